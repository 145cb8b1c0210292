"""Models of a given shape, empty or with random weights made on the device: for dry runs, benchmarks and tests."""

from collections.abc import Callable

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.hf import from_hf
from lorawgpu.gpu import Plan, padded
from lorawgpu.ops.checks import WG, fold_elements
from lorawgpu.ops.stores import F32, STORES, TERNARY, Store
from lorawgpu.weights.device import empty_weight
from lorawgpu.weights.device_model import HEAD_NORMS, Layer, Model, PerLayerInput, Widths, heads_of
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.tensors import EMBEDDING, HEAD, PER_LAYER_MODEL, Checkpoint, expected_tensors, is_linear

# The mixes of llama.cpp's llama-quantize: the store of most matrices, and of those that get more bits.
MIXES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
DENSE_STORES = [*MIXES, *(store.name for store in STORES.values() if store.random is not None and not store.scaled)]
FUSED_QKV = {"q4_k": "q5_k", "q5_k": "q6_k"}  # of a projection that is fused in the file
SMALLER_BLOCKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # for rows that are not whole blocks of 256
ONES = 3  # `kind` in random_weights.wgsl; the kinds for stores are in ops/stores.py


SHAPES = {name: from_hf(data, name) for name, data in CONFIGS.items()}


def empty_model(device, config: ModelConfig, store_of: Callable[[str], str]) -> Model:
    """A model whose buffers hold zeros. `store_of`: tensor name -> name of its store (ops/stores.py)."""

    def weight(label, names, shapes):
        columns, stacked = padded(shapes[0][1]), []
        for name, (rows, _) in zip(names, shapes, strict=True):
            store = STORES[store_of(name)]
            stacked.append((store, padded(rows), columns**-0.5 if store.scaled else 1.0))
        return empty_weight(device, stacked, columns, label)

    def vector(width, label):
        return device.tensor((padded(width),), label=label, kind="weights")

    def projection(index, spec, group):
        names = [f"{module}.weight" for module in config.group_modules(index, group)]
        return weight(f"layers.{index}.{group}", names, spec.group_shapes(group))

    def layer(index, spec):
        weights = {group: projection(index, spec, group) for group in spec.paths.groups()}
        roles = [role for role in spec.norms.paths() if role not in HEAD_NORMS]
        norms = {role: vector(spec.norm_width(role), "norm") for role in roles}
        heads, constants = heads_of(spec, config.rms_norm_eps), None
        if heads.constant_rows:
            shape = (heads.constant_rows, Widths.of(spec).qkv)
            constants = device.tensor(shape, label="constants", kind="weights")
        return Layer(index, spec, weights, norms, heads, constants, 1.0, per_layer_model(index))

    def per_layer_model(index):
        if not (width := config.per_layer_input):
            return None
        label, shape = f"layers.{index}.per_layer_model", (padded(width), padded(config.hidden_size))
        store = STORES[store_of(config.prefix + PER_LAYER_MODEL)]
        return empty_weight(device, [(store if store.lookup == "row" else F32, shape[0], 1.0)], shape[1], label)

    def per_layer():
        """A table of zeros that takes no memory."""
        row = np.zeros(config.per_layer_input * config.num_hidden_layers, np.uint16)
        return PerLayerInput(
            vector(config.per_layer_input, "norm"), "bf16", lambda ids: np.broadcast_to(row, (len(ids), len(row)))
        )

    table, name = [(config.vocab_size, config.hidden_size)], config.prefix + EMBEDDING
    embedding = weight("embedding", [name], table)
    layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
    head = embedding if config.tie_word_embeddings else weight("lm_head", [HEAD], table)
    shared = per_layer() if config.per_layer_input else None
    return Model(config, embedding, layers, vector(config.hidden_size, "norm"), head, shared)


def meta_model(device, checkpoint: Checkpoint) -> Model:
    """The model that `load_model` would return, with zeroed buffers. Reads only the checkpoint's headers."""
    return empty_model(device, checkpoint.config, checkpoint.store)


def mix_of(config: ModelConfig, name: str) -> Callable[[str], str]:
    """Tensor name -> store, as llama-quantize chooses it (llama-quant.cpp) for one of MIXES."""
    usual, better = MIXES[name]
    count, shapes = config.num_hidden_layers, expected_tensors(config)

    def store_of(tensor):
        more = tensor == HEAD or tensor == config.prefix + EMBEDDING and config.tie_word_embeddings
        if tensor.endswith(("v_proj.weight", "down_proj.weight")):
            index = int(tensor.split(".")[-4])
            more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
        store = better if more else usual
        if tensor.endswith("qkv_proj.weight"):
            store = FUSED_QKV[usual]
        return store if shapes[tensor][1] % STORES[store].block == 0 else SMALLER_BLOCKS[store]

    return store_of


def scale_words(store: Store, scale: float) -> tuple[int, int]:
    """A word of the scales and one of the offsets that end a record of random codes, for weights of deviation
    `scale`."""
    if store.scales == "f32":
        words = [int(np.float32(scale * unit).view(np.uint32)) for unit in store.unit]
    else:
        words = [int(np.float16(scale * unit).view(np.uint16)) * 0x10001 for unit in store.unit]  # two f16 per word
    return (*words, 0, 0)[0], (*words, 0, 0)[1]


def synthetic_model(device, kernels, config: ModelConfig, store="bf16") -> Model:
    """A model with random weights: dense ones are N(0, 1/in) in `store`, or in a mix of stores (a key of MIXES), where
    codes and block scales are uniform and in all have a variance of 1/in; ternary ones are uniform over -1, 0, 1.

    ValueError for a store that random_weights.wgsl cannot fill.
    """
    of_dense = mix_of(config, store) if store in MIXES else lambda name: store

    def store_of(name):
        return TERNARY.name if config.ternary and is_linear(name) else of_dense(name)

    if store not in DENSE_STORES:
        raise ValueError(f"there are no random weights in {store}")
    model, plan = empty_model(device, config, store_of), Plan(device, kernels)
    seeds = iter(range(1 << 30))

    def fill(tensor, kind, scale, store=F32):
        words = tensor.nbytes // 4
        grid = fold_elements(words, 1)
        params = {"count": words, "stride": grid[0] * WG, "kind": kind, "seed": next(seeds), "scale": scale}
        first = store.elements - store.scale_words
        params |= {"record": store.elements, "scales": first}
        params |= {"offsets": first + store.scale_words // max(1, len(store.unit))}
        params |= dict(zip(("first", "second"), scale_words(store, scale), strict=True))
        plan.record("random_weights", "main", grid, params=params, out=tensor)

    norms = [norm for layer in model.layers for norm in layer.norms.values()] + [model.norm]
    norms += [layer.constants for layer in model.layers if layer.constants]
    norms += [model.per_layer.norm] if model.per_layer else []
    with plan.section("fill"):
        for weight in model.matrices().values():
            for part in weight.parts:
                fill(part.tensor, part.store.random, weight.columns**-0.5, part.store)
        for tensor in norms:
            fill(tensor, ONES, 1.0)
    plan.run("fill")
    return model
