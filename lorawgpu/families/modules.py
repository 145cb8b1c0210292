"""The names of the linear layers that an adapter can target, over all families."""

# In forward order. Changing the order would change dropout masks: a fused layer takes the mask of its first part.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_MODULES = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj", "input_linear": "gate_proj",
                 "output_linear": "down_proj"}  # fmt: skip
PER_LAYER_MODULES = ("per_layer_input_gate", "per_layer_projection")
ALL_MODULES = (*LINEAR_MODULES, *FUSED_MODULES, *PER_LAYER_MODULES)
EMBEDDING, HEAD = ENDS = ("embed_tokens", "lm_head")  # outside of the layers
MAX_LAYERS = 1024


def dropout_stream(layer: int, module: str) -> int:
    """The number of a linear layer's stream of dropout masks."""
    if module == HEAD:
        return 2 * MAX_LAYERS * len(LINEAR_MODULES)
    name = FUSED_MODULES.get(module, module)
    if name in PER_LAYER_MODULES:
        return (MAX_LAYERS + layer) * len(LINEAR_MODULES) + PER_LAYER_MODULES.index(name)
    return layer * len(LINEAR_MODULES) + LINEAR_MODULES.index(name)
