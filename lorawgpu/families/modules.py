"""The linear layers of a block, in forward order. Changing the order would change dropout masks."""

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
