"""llama.cpp: a GGUF adapter.

The runtime computes W x + alpha/r * B (A x), with r from the shape of each lora_b and a single alpha. So alpha absorbs
rsLoRA's scale, and scales of single modules (alpha and rank patterns) go into their lora_b. Some archs (`llama`,
`granite`, `smollm3`, `mistral3`) store the rows of q and k in the order of interleaved RoPE, and lora_b must follow.
Format: https://github.com/ggml-org/llama.cpp (convert_lora_to_gguf.py, src/llama-adapter.cpp)
"""

from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.export.effect import LINEAR, WeightChange, one_scale
from lorawgpu.export.separate import fuse, separate
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import remark, unnamed_turn_end
from lorawgpu.families.registry import FAMILIES
from lorawgpu.files.gguf import GgufFile
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint, hf_name, permuted_heads, unpermute

RUNTIME = "llama.cpp"
FILE = "adapter.gguf"
NO_WINDOW = ("llama", "qwen2", "qwen3", "smollm3", "phi3", "mistral3")  # archs that ignore a sliding window


def arch_of(source: ExportSource, arch: str | None) -> str:
    """The `general.architecture` to write: by default that of a base that is a GGUF, because runtimes compare them.

    Raises UserError for one that does not fit the base model.
    """
    known = FAMILIES[source.config.family].gguf.archs
    if arch is not None and arch not in known:
        raise UserError(f"--arch {arch}: wanted {' or '.join(known)} for a {source.config.family} base model")
    own = source.base.arch if isinstance(source.base, GgufCheckpoint) else None
    return arch or (own if own in known else known[0])


def write(folder: Path, source: ExportSource, arch: str | None = None) -> None:
    import gguf

    names = {path: name for name, path in FAMILIES[source.config.family].gguf.layer_names.items()}
    effect = separate(source.effect)
    alpha, rest = one_scale({module: c.scale * len(c.a) for module, c in effect.items()})
    writer = gguf.GGUFWriter(folder / FILE, arch_of(source, arch))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    if (end := unnamed_turn_end(source)) is not None:
        writer.add_eos_token_id(end)
        writer.add_eot_token_id(end)
    for module, change in effect.items():
        layer, path = LINEAR.fullmatch(module).group("layer", "path")
        b = (change.b * rest[module]).astype(np.float32)
        if heads := _heads(source, module):
            b = permute(b, heads)
        name = f"blk.{layer}.{names[path]}.weight"
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(change.a, np.float32))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    (file,) = writer.fout
    end = file.tell()
    writer.close()
    if (folder / FILE).stat().st_size < end:  # numpy ignores errors of closing its copy of the file
        raise OSError(f"wrote fewer than {end} bytes")


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k `[heads*HD, n]` from the half-split RoPE order to llama.cpp's interleaved one."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def _heads(source: ExportSource, module: str) -> int:
    return permuted_heads(module, source.config, FAMILIES[source.config.family])


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    file = GgufFile(folder / FILE)
    alpha, changes = file.metadata["adapter.lora.alpha"], {}
    for name in file.tensors:
        base, matrix = name.rsplit(".", 1)
        if matrix == "lora_a":
            a, b = file.read(name)[0], file.read(f"{base}.lora_b")[0]
            module = hf_name(base, FAMILIES[source.config.family], source.config).removesuffix(".weight")
            if heads := _heads(source, module):
                b = unpermute(b, heads)
            changes[module] = WeightChange(a, b, alpha / b.shape[1])
    return fuse(changes, source.effect)


def remarks(source: ExportSource) -> list[str]:
    found = []
    if source.config.layers[0].mlp.act == "relu2":
        found += [
            "relu²: in most builds, arch bitnet computes SiLU instead (newer ones read bitnet.hidden_act from the base "
            "model's GGUF and fall back to SiLU without it); perplexity rises about sixfold, with or without an "
            "adapter. bitnet.cpp computes relu² for arch bitnet-b1.58",
            "the adapter must name the base model's architecture, and runtimes disagree on it: bitnet in llama.cpp, "
            'bitnet-b1.58 in bitnet.cpp and its forks; on "model arch and LoRA arch mismatch" try the other as --arch',
            "older bitnet graphs multiply by the weight scale after adding the adapter: if the base model stores its "
            "scales as separate tensors, the adapter runs at the wrong scale",
        ]
    if source.config.ternary:
        found.append(
            "activations are quantized in blocks, not per token as in training, or not at all: expect the logits to "
            "differ by a few percent"
        )
    else:
        found.append(
            "with a quantized base model, llama.cpp also rounds activations to 8 bits in blocks. That moves the logits "
            "by about 3% with Q4_1, as much as a weak adapter does; the adapter itself runs in float32"
        )
    if len(set(source.scales.values())) > 1 or source.lora.use_rslora:
        found.append(
            "alpha and lora_b absorb the scales of rsLoRA and patterns, so adapter.lora.alpha differs from lora_alpha"
        )
    end = unnamed_turn_end(source)
    found += remark(
        source,
        "llama.cpp reads the ends from the base model's file and knows the common ones by name; for any other add "
        f"--override-kv tokenizer.ggml.eot_token_id=int:{end}",
    )
    return found + family_remarks(source)


def family_remarks(source: ExportSource) -> list[str]:
    """What llama.cpp does otherwise with the base model, whether or not it has an adapter."""
    config, found = source.config, []
    windows = [layer.attention.window for layer in config.layers if layer.attention.window is not None]
    if windows and FAMILIES[config.family].gguf.archs[0] in NO_WINDOW:
        found.append(
            f"the base model's sliding window of {min(windows)} tokens is lost: llama.cpp attends to all tokens, so "
            "longer sequences give other logits than in training"
        )
    if config.longest_short:
        found.append(
            "longrope: llama.cpp chooses between short and long factors by its context size, not by the length of a "
            f"sequence; start it with a context of at most {config.longest_short} tokens for shorter sequences"
        )
    return found
