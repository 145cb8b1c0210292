"""Compare llama.cpp or mlx-lm, running our exported adapters, with lorawgpu: one tiny model of every family.

    pip install llama-cpp-python                (or "mlx[cpu]" mlx-lm)
    python scripts/check_families.py --runtime llama.cpp --python PYTHON > benchmarks/llama_cpp_families.txt
    python scripts/check_families.py --runtime mlx-lm --python PYTHON > benchmarks/mlx_families.txt

PYTHON is the interpreter of the environment with the runtime (default: this one). The models are those of the golden
cases, for llama.cpp written as float32 GGUF. The adapters are random, of every linear layer, with rsLoRA and ranks and
scales of their own for some modules. Compared: the logits of 40 tokens without and with the adapter, and the adapter's
effect (logits with it minus logits without it). Options that a runtime is known to ignore, such as a sliding window,
are switched off first and listed. The exit code is 1 if a family disagrees that the runtime has.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import check_llama_cpp
import check_mlx
import numpy as np

from lorawgpu.api.model import load
from lorawgpu.cli import main_of
from lorawgpu.errors import CheckFailed
from lorawgpu.export.__main__ import main as export
from lorawgpu.export.weights_file import read_weights, write_weights
from lorawgpu.families.hf import from_hf
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, write_adapter
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import expected_tensors

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))
from family_gguf import write_case  # noqa: E402

# Limits on the logits and on the adapter's effect: ten times float32's noise; llama.cpp's GELU is a table in float16.
EXACT, GELU_TABLE = 2e-5, 3e-3
# Case -> architecture of the GGUF, and the keys of config.json that are changed because llama.cpp ignores the option.
# gemma4: it takes the last two layers before the shared ones for a local and a global one, as in published models.
LLAMA_CPP = {
    "llama_dense": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 20}),
    "gemma4": ("gemma4", {"num_kv_shared_layers": 4}),
    "gemma4_dense": ("gemma4", {}),
    "smollm3": ("smollm3", {}),
    "mistral_window": ("llama", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite4": ("granite", {}),
}
# The same for mlx-lm. gemma3: it rounds sqrt(hidden_size) to bf16, which 6 survives. gemma4: a quarter of 24 dimensions
# are pairs, a quarter of the case's 20 are not.
MLX = {case: {} for case in LLAMA_CPP} | {
    "gemma2": {"sliding_window": 512},
    "gemma3": {"hidden_size": 36},
    "gemma4": {"global_head_dim": 24},
    "gemma4_dense": {"global_head_dim": 24},
    "mistral_window": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "olmo3": {"rope_theta": 500000.0},
}


def changed_case(folder: Path, case: str, keys: dict) -> Path:
    """A copy of a golden case with other keys in its config.json; tensors of other shapes then are cut or repeated."""
    copy = folder / case
    copy.mkdir()
    config = json.loads((TESTS / "golden" / case / "config.json").read_text())
    text = config.get("text_config", config)
    text |= keys
    config["vocab_size"] = text["vocab_size"]  # mlx-lm reads it here, for multimodal models too
    (copy / "config.json").write_text(json.dumps(config))
    shapes, tensors = expected_tensors(from_hf(config)), read_weights(TESTS / "golden" / case)
    for name, shape in shapes.items():
        tensors[name] = replace(tensors[name], data=np.resize(tensors[name].data, shape))
    write_weights(copy, iter(tensors.items()))
    return copy


def random_adapter(folder: Path, model: Path) -> Path:
    config, random = open_checkpoint(model).config, np.random.default_rng(0)
    names = config.all_linear() + (PER_LAYER_MODULES if config.per_layer_input else ())
    lora = LoraConfig(4, 8, names, True, 0.0, {"layers.1.self_attn.o_proj": 2, "down_proj": 6}, {"o_proj": 3})
    shapes = adapter_shapes(lora, config)
    tensors = {n: (random.standard_normal(s) * 0.5 / np.sqrt(s[1])).astype(np.float32) for n, s in shapes.items()}
    write_adapter(folder, lora, tensors, "base")
    return folder


def exported(folder: Path, adapter: Path, model: Path, to: str) -> Path:
    out = folder / ("adapter.gguf" if to == "gguf" else "mlx")
    argv = ["--adapter", adapter, "--model", model, "--to", to, "--out", out]
    with contextlib.redirect_stdout(io.StringIO()):
        if export(list(map(str, argv))):
            raise CheckFailed("the export failed")
    return out


def compare(folder: Path, model: Path, runtime: str, python: str) -> tuple[str, bool]:
    """A row of errors relative to ours, and whether they are within the limits."""
    theirs = check_llama_cpp.theirs if runtime == "llama.cpp" else check_mlx.theirs
    adapter = random_adapter(folder / "adapter", model)
    out = exported(folder, adapter, model, "gguf" if runtime == "llama.cpp" else "mlx")
    ids = (np.arange(40) * 37 % (open_checkpoint(model).config.vocab_size - 20) + 3).tolist()
    ours, others = [load(model, a).logits(ids) for a in (None, adapter)], []
    for one in (None, out):
        others.append(theirs(python, model, one, ids, folder))
    relative = check_mlx.relative
    base, with_it = (relative(b, a) for a, b in zip(ours, others, strict=True))
    effect = relative(others[1] - others[0], ours[1] - ours[0])
    size = relative(ours[1], ours[0])
    row = (
        f"logits {base:.1e}, with the adapter {with_it:.1e}; its effect, {size:.1e} of the logits, off by {effect:.1e}"
    )
    table = runtime == "llama.cpp" and open_checkpoint(model).config.layers[0].mlp.act == "gelu_tanh"
    return row, max(base, with_it, effect) <= (GELU_TABLE if table else EXACT)


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("llama.cpp", "mlx-lm"), required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--case", action="append", help="only these golden cases")
    args = parser.parse_args(argv)
    package = "llama_cpp_python" if args.runtime == "llama.cpp" else "mlx-lm"
    query = [args.python, "-c", f"from importlib.metadata import version; print(version('{package}'))"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    print(f"{package} {version}, 40 tokens; ||theirs - ours|| / ||ours||")
    faults = []
    for case in args.case or LLAMA_CPP:
        arch, keys = LLAMA_CPP[case] if args.runtime == "llama.cpp" else ("", MLX[case])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = changed_case(folder, case, keys)
            if args.runtime == "llama.cpp":
                model = write_case(model, folder / "model.gguf", arch, tokenizer=True)
            try:
                row, good = compare(folder, model, args.runtime, args.python)
            except CheckFailed as error:
                row, good = str(error).strip().splitlines()[-1], False
        note = "".join(f"   ({key} {value})" for key, value in keys.items())
        print(f"{case:<15}{row}{note}", flush=True)
        if not good:
            faults.append(case)
    if faults:
        raise CheckFailed(f"{args.runtime} and lorawgpu disagree on {', '.join(faults)}")
    print(f"{args.runtime} agrees with us")


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
