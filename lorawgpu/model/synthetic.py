"""Models of a given shape with random weights made on the device: for benchmarks and plans, not for use."""

from ..gpu import Plan, padded
from ..ops.checks import fold_elements
from ..ops.matmul import Segments
from .adapter_layout import GROUPS
from .config import ModelConfig, Rope
from .layers import NORMS, Layer, Model
from .weights import Part, Weight, pad_vector

WORDS_PER_STORE = {"f32": 1, "bf16": 2, "f16": 2}
KINDS = {"ternary": 0, "bf16": 1, "f32": 2, "one": 3}


def shape_config(*, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, bitnet=False, tied=True, theta=1e4):
    """A ModelConfig of these sizes: BitNet (relu2, sub-norms, ternary) or dense Llama (silu)."""
    return ModelConfig(
        family="bitnet" if bitnet else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope=Rope(theta),
        act="relu2" if bitnet else "silu",
        sub_norms=bitnet,
        tie_word_embeddings=tied,
        ternary="multiply" if bitnet else None,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
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


def synthetic_model(device, kernels, config: ModelConfig, store="bf16") -> Model:
    """A model of random weights: dense ones N(0, 1/in) in `store` (bf16 or f32), ternary ones uniform over -1, 0, 1."""
    plan = Plan(device, kernels)
    seeds = iter(range(1 << 30))

    def fill(tensor, kind, scale):
        words = tensor.nbytes // 4
        grid = fold_elements(words, 1)
        params = {"count": words, "stride": grid[0] * 256, "kind": KINDS[kind], "seed": next(seeds), "scale": scale}
        plan.record("random", "main", grid, params=params, out=tensor)

    def weight(label, widths, columns, ternary):
        rows, columns = sum(padded(w) for w in widths), padded(columns)
        ends = tuple(sum(padded(w) for w in widths[: i + 1]) for i in range(len(widths)))
        kind = "ternary" if ternary else store
        line, dtype = (columns // 16 * 4, "u32") if ternary else (columns * 4 // WORDS_PER_STORE[store], store)
        step = device.max_binding // line // 16 * 16
        parts = []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            shape = ((stop - start) // 4, columns // 4) if ternary else (stop - start, columns)
            parts.append(Part(start, stop, device.tensor(shape, dtype, f"{label}[{start}:]", "weights")))
            fill(parts[-1].tensor, kind, columns**-0.5)
        scales = (columns**-0.5,) * len(widths) if ternary else (1.0,) * len(widths)
        return Weight(rows, columns, "ternary" if ternary else store, Segments(ends, scales), tuple(parts), ternary)

    def norm(width):
        tensor = device.tensor(pad_vector([1.0] * width).shape, label="norm", kind="weights")
        fill(tensor, "one", 1.0)
        return tensor

    shapes, widths = config.linear_shapes(), config.norm_shapes()
    with plan.section("fill"):
        embedding = weight("embedding", [config.vocab_size], config.hidden_size, False)
        layers = tuple(
            Layer(
                i,
                *(
                    weight(g, [shapes[p][0] for p in paths], shapes[paths[0]][1], bool(config.ternary))
                    for g, paths in GROUPS.items()
                ),
                **{field: norm(widths[path][0]) for field, path in NORMS.items() if path in widths},
            )
            for i in range(config.num_hidden_layers)
        )
        head = (
            embedding
            if config.tie_word_embeddings
            else weight("lm_head", [config.vocab_size], config.hidden_size, False)
        )
        final = norm(config.hidden_size)
    plan.run("fill")
    return Model(config, embedding, layers, final, head)
