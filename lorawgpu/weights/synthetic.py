"""Models of a given shape, empty or with random weights made on the device: for dry runs, benchmarks and tests."""

from collections.abc import Callable

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import equal_layers
from lorawgpu.families.registry import FAMILIES
from lorawgpu.families.rope import Rope
from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu import Plan, padded
from lorawgpu.ops.checks import WG, fold_elements
from lorawgpu.ops.stores import F32, STORES, TERNARY, Store
from lorawgpu.weights.device import empty_weight
from lorawgpu.weights.device_model import Layer, Model
from lorawgpu.weights.tensors import EMBEDDING, HEAD, Checkpoint, expected_tensors, is_linear

# The mixes of llama.cpp's llama-quantize: the store of most matrices, and of those that get more bits.
MIXES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
DENSE_STORES = [*MIXES, *(store.name for store in STORES.values() if store.random is not None and not store.scaled)]
SMALLER_BLOCKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # for rows that are not whole blocks of 256
ONES = 3  # `kind` in random_weights.wgsl; the kinds for stores are in ops/stores.py


def shape_config(*, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, bitnet=False, tied=True, theta=1e4):
    """A ModelConfig of these sizes: BitNet (relu2, sub-norms, ternary) or dense Llama (silu)."""
    family = FAMILIES["bitnet" if bitnet else "llama"]
    return ModelConfig(
        family=family.name,
        vocab_size=vocab,
        hidden_size=hidden,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        ternary="multiply" if bitnet else None,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
        layers=equal_layers(
            layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=mlp,
            act=family.gguf.act,
            rope=Rope(theta),
            norms=family.norms,
        ),
    )


SHAPES = {
    "bitnet-2b": shape_config(
        layers=30, hidden=2560, heads=20, kv_heads=5, head_dim=128, mlp=6912, vocab=128256, bitnet=True, theta=5e5
    ),
    "smollm2-135m": shape_config(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152),
    "llama-3.2-1b": shape_config(
        layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, vocab=128256, theta=5e5
    ),
    "falcon3-1b-1.58bit": shape_config(
        layers=18, hidden=2048, heads=8, kv_heads=4, head_dim=256, mlp=8192, vocab=131072, bitnet=True, theta=1e6
    ),
    "tiny": shape_config(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=160, vocab=320),
}


def empty_model(device, config: ModelConfig, store_of: Callable[[str], str]) -> Model:
    """A model whose buffers hold zeros. `store_of`: tensor name -> name of its store (ops/stores.py)."""

    def weight(label, names, shapes):
        columns, stacked = padded(shapes[0][1]), []
        for name, (rows, _) in zip(names, shapes, strict=True):
            store = STORES[store_of(name)]
            stacked.append((store, padded(rows), columns**-0.5 if store.scaled else 1.0))
        return empty_weight(device, stacked, columns, label)

    def norm(width):
        return device.tensor((padded(width),), label="norm", kind="weights")

    def projection(index, shapes, group):
        names = [f"model.layers.{index}.{path}.weight" for path in GROUPS[group]]
        return weight(f"layers.{index}.{group}", names, [shapes[path] for path in GROUPS[group]])

    def layer(index, spec):
        shapes = spec.linear_shapes()
        weights = {group: projection(index, shapes, group) for group in GROUPS}
        return Layer(index, spec, weights, {role: norm(spec.norm_width(role)) for role in spec.norms.paths()})

    table = [(config.vocab_size, config.hidden_size)]
    embedding = weight("embedding", [EMBEDDING], table)
    layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
    head = embedding if config.tie_word_embeddings else weight("lm_head", [HEAD], table)
    return Model(config, embedding, layers, norm(config.hidden_size), head)


def meta_model(device, checkpoint: Checkpoint) -> Model:
    """The model that `load_model` would return, with zeroed buffers. Reads only the checkpoint's headers."""
    return empty_model(device, checkpoint.config, checkpoint.store)


def mix_of(config: ModelConfig, name: str) -> Callable[[str], str]:
    """Tensor name -> store, as llama-quantize chooses it (llama-quant.cpp) for one of MIXES."""
    usual, better = MIXES[name]
    count, shapes = config.num_hidden_layers, expected_tensors(config)

    def store_of(tensor):
        more = tensor == HEAD or tensor == EMBEDDING and config.tie_word_embeddings
        if tensor.endswith(("v_proj.weight", "down_proj.weight")):
            index = int(tensor.split(".")[2])
            more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
        store = better if more else usual
        return store if shapes[tensor][1] % STORES[store].block == 0 else SMALLER_BLOCKS[store]

    return store_of


def scale_words(store: Store, scale: float) -> tuple[int, int]:
    """The first and third word of the scales that end a record of random codes, for weights of deviation `scale`."""
    if store.scales == "f32":
        return 2 * (int(np.float32(scale * store.unit[0]).view(np.uint32)),)
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
        params |= {"record": store.elements, "scales": store.elements - store.scale_words}
        params |= dict(zip(("first", "second"), scale_words(store, scale), strict=True))
        plan.record("random_weights", "main", grid, params=params, out=tensor)

    norms = [norm for layer in model.layers for norm in layer.norms.values()] + [model.norm]
    with plan.section("fill"):
        for weight in model.matrices().values():
            for part in weight.parts:
                fill(part.tensor, part.store.random, weight.columns**-0.5, part.store)
        for tensor in norms:
            fill(tensor, ONES, 1.0)
    plan.run("fill")
    return model
