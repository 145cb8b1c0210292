"""Models of a given shape, empty or with random weights made on the device: for plans and benchmarks, not for use."""

from collections.abc import Callable

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import equal_layers
from lorawgpu.families.registry import FAMILIES
from lorawgpu.families.rope import Rope
from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu import Plan, padded
from lorawgpu.ops.checks import WG, fold_elements
from lorawgpu.ops.matmul import Segments
from lorawgpu.weights.device import Weight, empty_parts
from lorawgpu.weights.device_model import Layer, Model
from lorawgpu.weights.tensors import EMBEDDING, HEAD, Checkpoint

KINDS = {"ternary": 0, "bf16": 1, "f32": 2, "one": 3}


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


def empty_model(device, config: ModelConfig, store_of: Callable[[list[str]], str]) -> Model:
    """The buffers of a model, which hold zeros. `store_of`: how dense matrices of these names are stored together."""

    def weight(label, names, widths, columns, ternary):
        rows, columns = sum(padded(w) for w in widths), padded(columns)
        ends = tuple(sum(padded(w) for w in widths[: i + 1]) for i in range(len(widths)))
        store = "ternary" if ternary else store_of(names)
        parts = empty_parts(device, rows, columns, store, label)
        scales = (columns**-0.5,) * len(widths) if ternary else (1.0,) * len(widths)
        return Weight(rows, columns, store, Segments(ends, scales), parts, ternary)

    def norm(width):
        return device.tensor((padded(width),), label="norm", kind="weights")

    def projection(layer, shapes, group):
        paths = GROUPS[group]
        names = [f"model.layers.{layer}.{path}.weight" for path in paths]
        widths = [shapes[path][0] for path in paths]
        return weight(f"layers.{layer}.{group}", names, widths, shapes[paths[0]][1], bool(config.ternary))

    def layer(index, spec):
        shapes = spec.linear_shapes()
        weights = {group: projection(index, shapes, group) for group in GROUPS}
        return Layer(index, spec, weights, {role: norm(spec.norm_width(role)) for role in spec.norms.paths()})

    embedding = weight("embedding", [EMBEDDING], [config.vocab_size], config.hidden_size, False)
    layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
    head = embedding
    if not config.tie_word_embeddings:
        head = weight("lm_head", [HEAD], [config.vocab_size], config.hidden_size, False)
    return Model(config, embedding, layers, norm(config.hidden_size), head)


def outline(device, checkpoint: Checkpoint) -> Model:
    """The buffers that `load_model` would fill, from the headers of the checkpoint alone."""

    def store_of(names):  # as weights.dense_weight decides
        stores = {checkpoint.store(name) for name in names}
        return stores.pop() if len(stores) == 1 else "f32"

    return empty_model(device, checkpoint.config, store_of)


def synthetic_model(device, kernels, config: ModelConfig, store="bf16") -> Model:
    """A model of random weights: dense ones N(0, 1/in) in `store` (bf16 or f32), ternary ones uniform over -1, 0, 1."""
    model, plan = empty_model(device, config, lambda names: store), Plan(device, kernels)
    seeds = iter(range(1 << 30))

    def fill(tensor, kind, scale):
        words = tensor.nbytes // 4
        grid = fold_elements(words, 1)
        params = {"count": words, "stride": grid[0] * WG, "kind": KINDS[kind], "seed": next(seeds), "scale": scale}
        plan.record("random", "main", grid, params=params, out=tensor)

    norms = [norm for layer in model.layers for norm in layer.norms.values()] + [model.norm]
    with plan.section("fill"):
        for weight in model.matrices().values():
            for part in weight.parts:
                fill(part.tensor, weight.store, weight.columns**-0.5)
        for tensor in norms:
            fill(tensor, "one", 1.0)
    plan.run("fill")
    return model
