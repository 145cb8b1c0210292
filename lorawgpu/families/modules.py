"""The linear layers of a block, in forward order. The order is part of the dropout mask: a change moves its bits."""

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
