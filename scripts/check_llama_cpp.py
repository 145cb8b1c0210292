"""Compare llama.cpp, running our GGUF adapter, with lorawgpu: logits of a prompt, with and without the adapter.

    pip install llama-cpp-python
    python scripts/check_llama_cpp.py --model M.gguf --adapter A --llama-python PYTHON > benchmarks/llama_cpp.txt

PYTHON is the interpreter of the environment with llama-cpp-python (default: this one). The exit code is 1 if they
disagree. Two bases are compared:

float32     the GGUF's blocks written out in float32, with float32 keys and values, so both sides compute the same
            products, in a different order. Compared: the logits, and the adapter's effect (logits with it minus logits
            without it), which best shows a wrong scale or row order.
quantized   the GGUF as it is. llama.cpp rounds the activations of each product to 8 bits in blocks of 32; lorawgpu does
            not. This moves the logits by about 3e-2, as much as a weak adapter, so only the logits are compared.

Four adapters: as given (plain); eight times as strong (strong); with rsLoRA and rank and alpha patterns, which GGUF
cannot express (peculiar); and a control that must not agree: plain, with q and k rows in Hugging Face's order.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np

from lorawgpu.api.model import load
from lorawgpu.cli import main_of
from lorawgpu.errors import CheckFailed
from lorawgpu.export.__main__ import main as export
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter

PROMPT = (
    "<|im_start|>user\nName the three primary colours, and say in one sentence why they are called primary.<|im_end|>\n"
    "<|im_start|>assistant\nThe primary colours are red, yellow and blue."
)
EXACT, ROUNDED = 2e-5, 6e-2  # limits on logits: ten times float32's noise, twice that of 8-bit activations
EFFECT = 1e-3  # limit on the adapter's effect in float32, which is a hundredth of the logits
THEIRS = """
import json, sys
import numpy as np
import llama_cpp
model, adapter, ids, out = sys.argv[1:]
ids = json.loads(ids)
llm = llama_cpp.Llama(model, lora_path=adapter or None, logits_all=True, n_ctx=512, n_batch=512, n_threads=2,
                      flash_attn=False, type_k=0, type_v=0, verbose=False)  # keys and values: GGML_TYPE_F32
llm.eval(ids)
np.save(out, np.array(llm.scores[:len(ids)], np.float32))
print(llama_cpp.__version__)
"""


def dequantized(source: Path, out: Path) -> Path:
    """The same GGUF with every block of weights written out in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def strong_adapter(folder: Path, source: Path) -> Path:
    lora, tensors = read_adapter(source)
    write_adapter(folder, replace(lora, alpha=8 * lora.alpha), tensors, "base")
    return folder


def peculiar_adapter(folder: Path, source: Path) -> Path:
    """The same matrices with rsLoRA and patterns, and cut ranks for some modules, which GGUF cannot express."""
    lora, tensors = read_adapter(source)
    ranks = {"mlp.down_proj": 3, "self_attn.k_proj": 5}
    changed = LoraConfig(
        lora.r, lora.alpha / 2, lora.target_modules, True, 0.0, ranks, {"self_attn.q_proj": lora.alpha * 2}
    )
    for name, tensor in tensors.items():
        rank = changed.rank(name.removeprefix("base_model.model.").split(".lora_")[0])
        tensors[name] = tensor[:rank] if "lora_A" in name else tensor[:, :rank]
    write_adapter(folder, changed, tensors, "base")
    return folder


def theirs(python: str, model: Path, adapter: Path | None, ids: list[int], folder: Path) -> np.ndarray:
    """llama.cpp's logits [len(ids), V], from a process in its own environment."""
    out = folder / "theirs.npy"
    argv = [python, "-c", THEIRS, str(model), str(adapter or ""), json.dumps(ids), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"llama.cpp failed: {done.stderr[-2000:]}")
    return np.load(out)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compare(base: str, ours: dict, others: dict) -> list[str]:
    """Print a row per adapter, with errors relative to ours. Returns descriptions of those out of limits."""
    faults = []
    for name, logits in others.items():
        mine = ours["plain" if name == "control" else name]
        error, effect = relative(logits, mine), 0.0
        same = (logits.argmax(1) == mine.argmax(1)).mean()
        row = f"{base:<9} {name:<9} logits {error:.1e}   same likeliest token {same:4.0%}"
        if name != "none":
            want, got = mine - ours["none"], logits - others["none"]
            effect, size = relative(got, want), relative(mine, ours["none"])
            cosine = float((got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want))
            row += f"   adapter's change: {size:.1e} of the logits, off by {effect:.1e} of itself, cosine {cosine:.5f}"
        print(row)
        exact = base == "float32"
        good = error <= EXACT and effect <= EFFECT if exact else error <= ROUNDED
        if name == "control" and exact and good:
            faults.append("the control agrees in float32, so this comparison detects nothing")
        if name != "control" and not good:
            faults.append(f"{base}, {name}: off by {error:.1e} of the logits, {effect:.1e} of the adapter's change")
    return faults


def export_all(folder: Path, model: Path, adapters: dict[str, Path]) -> dict[str, Path]:
    """Export all adapters to GGUF, and the control."""
    files = {}
    for name, adapter in (adapters | {"control": adapters["plain"]}).items():
        files[name] = folder / f"{name}.gguf"
        argv = ["--adapter", adapter, "--model", model, "--to", "gguf", "--out", files[name]]
        wrong = patch("lorawgpu.export.gguf.permuted_heads", lambda *_: 0)
        with wrong if name == "control" else nullcontext(), redirect_stdout(io.StringIO()):
            if export(list(map(str, argv))):
                raise CheckFailed(f"the export of the {name} adapter failed")
    return files


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--llama-python", default=sys.executable)
    args = parser.parse_args(argv)
    query = [args.llama_python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = {
            "plain": args.adapter,
            "strong": strong_adapter(folder / "strong", args.adapter),
            "peculiar": peculiar_adapter(folder / "peculiar", args.adapter),
        }
        files = {"none": None} | export_all(folder, args.model, adapters)
        ours = {}
        for kind, adapter in ({"none": None} | adapters).items():
            llm = load(args.model, adapter)
            ids = llm.encode(PROMPT, raw=True)
            ours[kind] = llm.logits(ids)
        print(f"llama-cpp-python {version}, {args.model.name}, {len(ids)} tokens; ||theirs - ours|| / ||ours||")
        faults = []
        for base, model in (("float32", dequantized(args.model, folder / "f32.gguf")), ("quantized", args.model)):
            others = {n: theirs(args.llama_python, model, file, ids, folder) for n, file in files.items()}
            faults += compare(base, ours, others)
    if faults:
        raise CheckFailed("; ".join(faults))
    print("llama.cpp agrees with us, and not with the control")


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
