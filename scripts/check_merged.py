"""Compare llama.cpp, running our merged f16 GGUF files, with float64: one tiny model of every family, and one given.

    pip install llama-cpp-python
    python scripts/check_merged.py --python PYTHON [--model M --adapter A] > benchmarks/llama_cpp_merged.txt

PYTHON is the interpreter of the environment with llama-cpp-python (default: this one). The models are those of the
golden cases with a tokenizer of single bytes, the adapters random, of every linear layer. Needs no GPU: what we
compute comes from the float64 reference, which the golden cases judge. Compared are the logits of 40 tokens: of a
merged float32 file (`f32`) and a merged f16 file (`f16`), each with those of base and adapter, unmerged. The f16 file
is also compared with its own weights in float64 (`own`): what is left is that llama.cpp rounds activations to f16 too.
The adapter's change of the logits stands next to them. The exit code is 1 if a file is off its limit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import check_families  # noqa: F401 (puts tests/ on the path)
import check_llama_cpp
import numpy as np
from check_families import EXACT, GELU_TABLE, LLAMA_CPP, changed_case
from check_llama_cpp import relative, theirs
from test_export_gguf_merged import with_tokenizer  # of tests/, which check_families has put on the path

from lorawgpu.cli import main_of
from lorawgpu.data.batching import Sample, flatten
from lorawgpu.doctor.tiny_models import reference_model
from lorawgpu.errors import CheckFailed
from lorawgpu.export import gguf_merged
from lorawgpu.export.source import open_source
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, write_adapter
from lorawgpu.reference.model import model_forward
from lorawgpu.weights.loader import open_checkpoint

# Ten times float32's noise, or what llama.cpp's GELU, a table in f16, makes of it; f16 has 11 bits, and these models
# have random weights, which carry an error of an activation to the logits.
ROUNDED = 4e-3
KEYS = LLAMA_CPP | {case: ("", keys | {"sliding_window_pattern": 6}) for case, (_, keys) in LLAMA_CPP.items()
                    if case in ("gemma2", "gemma3")}  # fmt: skip


def family_case(folder: Path, case: str) -> Path:
    """A golden case as a folder that llama.cpp can describe, with a tokenizer."""
    model, plain = changed_case(folder, case, KEYS[case][1]), with_tokenizer(case, folder / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, model / name)
    config = json.loads((model / "config.json").read_text())
    if "sliding_window_pattern" in KEYS[case][1]:
        config.get("text_config", config).pop("layer_types", None)  # llama.cpp has the pattern instead
    (model / "config.json").write_text(json.dumps(config))
    return model


def logits_of(checkpoint, ids: list[int], lora: LoraConfig | None = None, tensors: dict | None = None) -> np.ndarray:
    """The float64 reference's logits, [len(ids), V]. `lora`: with one scale for all modules."""
    sample = Sample(np.array(ids, np.int32), np.array([*ids[1:], ids[0]], np.int32))
    batch = flatten([sample], len(ids))
    rows = replace(batch, target_rows=np.arange(len(ids)), target_ids=sample.labels)
    model = reference_model(checkpoint, tensors or {}, lora.scale("") if lora else 1.0)
    return model_forward(model, rows)[0]


def compare(folder: Path, model: Path, adapter: Path, ids: list[int] | None, python: str) -> tuple[str, bool]:
    """A row of errors relative to the reference, and whether they are within the limits."""
    source = open_source(str(adapter), str(model), True)
    ids = ids or (np.arange(40) * 37 % (source.config.vocab_size - 20) + 3).tolist()
    base, ours = logits_of(source.checkpoint, ids), logits_of(source.checkpoint, ids, source.lora, source.tensors)
    errors = {}
    for kind in ("f32", "f16"):
        gguf_merged.write(folder, source, kind)
        _, merged = gguf_merged.check_file(folder, source, kind)
        logits = theirs(python, merged.path, None, ids, folder)
        errors[kind] = relative(logits, ours)
    own = relative(logits, logits_of(merged, ids))
    row = f"f32 {errors['f32']:.1e}, f16 {errors['f16']:.1e} (own {own:.1e}); the adapter: {relative(ours, base):.1e}"
    exact = GELU_TABLE if source.config.layers[0].mlp.act == "gelu_tanh" else EXACT
    return row, errors["f32"] <= exact and errors["f16"] <= ROUNDED and own <= ROUNDED


def random_adapter(folder: Path, model: Path) -> Path:
    config, random = open_checkpoint(model).config, np.random.default_rng(0)
    names = config.all_linear() + (PER_LAYER_MODULES if config.per_layer_input else ())
    lora = LoraConfig(4, 8, names)
    shapes = adapter_shapes(lora, config)
    tensors = {n: (random.standard_normal(s) * 0.5 / np.sqrt(s[1])).astype(np.float32) for n, s in shapes.items()}
    write_adapter(folder, lora, tensors, "base")  # not the case's name: llama.cpp wants certain tokens of a "phi3"
    return folder


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--case", action="append", help="only these golden cases")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapter", type=Path)
    args = parser.parse_args(argv)
    query = [args.python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    print(f"llama-cpp-python {version}, merged files, 40 tokens; ||theirs - float64|| / ||float64||")
    faults = []
    for case in [*(args.case or LLAMA_CPP), *([args.model.name] if args.model else [])]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            given = args.model and case == args.model.name
            model = args.model if given else family_case(folder, case)
            adapter = args.adapter if given else random_adapter(folder / "adapter", model)
            ids = open_checkpoint(model).tokenizer().encode(check_llama_cpp.PROMPT) if given else None
            try:
                row, good = compare(folder, model, adapter, ids, args.python)
            except CheckFailed as error:
                row, good = str(error).strip().splitlines()[-1], False
        print(f"{case:<14} {row}", flush=True)
        if not good:
            faults.append(case)
    if faults:
        raise CheckFailed(f"llama.cpp and lorawgpu disagree on {', '.join(faults)}")
    print("llama.cpp agrees with us")


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
