"""Compare llama.cpp, running our merged f16 GGUF files, with lorawgpu: one tiny model of every family, and one given.

    pip install llama-cpp-python
    python scripts/check_merged.py --python PYTHON [--model M --adapter A] > benchmarks/llama_cpp_merged.txt

PYTHON is the interpreter of the environment with llama-cpp-python (default: this one). The models are those of the
golden cases with a tokenizer of single bytes, the adapters random, of every linear layer, with rsLoRA and ranks and
scales of their own for some modules. Compared: llama.cpp's logits of 40 tokens with ours of the same file (`file`),
where llama.cpp rounds activations to f16 too; and with ours of base and adapter, unmerged (`unmerged`). The
adapter's change of the logits is shown next to them. The exit code is 1 if a file's logits differ by more than 1e-3, or
if what is unmerged differs by more than a fiftieth of what the adapter changes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import check_families  # noqa: F401 (puts tests/ on the path)
import check_llama_cpp
import numpy as np
from check_families import LLAMA_CPP, changed_case, random_adapter
from check_llama_cpp import relative, theirs
from test_export_gguf_merged import with_tokenizer  # of tests/, which check_families has put on the path

from lorawgpu.api.model import load
from lorawgpu.cli import main_of
from lorawgpu.errors import CheckFailed
from lorawgpu.export import gguf_merged
from lorawgpu.export.source import open_source

FILE, UNMERGED = 1e-3, 1 / 50  # limits: on the logits; on their difference, relative to what the adapter changes
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


def compare(folder: Path, model: Path, adapter: Path, ids: list[int] | None, python: str) -> tuple[str, bool]:
    """A row of errors relative to ours, and whether they are within the limits."""
    source = open_source(str(adapter), str(model), True)
    gguf_merged.write(folder, source, "f16")
    gguf_merged.check_file(folder, source, "f16")
    file = folder / gguf_merged.FILE
    ids = ids or (np.arange(40) * 37 % (source.config.vocab_size - 20) + 3).tolist()
    base, ours, ours_of_file = (load(m, a).logits(ids) for m, a in ((model, None), (model, adapter), (file, None)))
    logits = theirs(python, file, None, ids, folder)
    of_file, unmerged, size = relative(logits, ours_of_file), relative(logits, ours), relative(ours, base)
    row = f"file {of_file:.1e}, unmerged {unmerged:.1e}; the adapter changes {size:.1e} of the logits"
    return row, of_file <= FILE and unmerged <= UNMERGED * size


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--case", action="append", help="only these golden cases")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapter", type=Path)
    args = parser.parse_args(argv)
    query = [args.python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    print(f"llama-cpp-python {version}, merged files in f16, 40 tokens; ||theirs - ours|| / ||ours||")
    faults = []
    for case in [*(args.case or LLAMA_CPP), *([args.model.name] if args.model else [])]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            given = args.model and case == args.model.name
            model = args.model if given else family_case(folder, case)
            adapter = args.adapter if given else random_adapter(folder / "adapter", model)
            ids = load(model).encode(check_llama_cpp.PROMPT, raw=True) if given else None
            try:
                row, good = compare(folder, model, adapter, ids, args.python)
            except CheckFailed as error:
                row, good = str(error).strip().splitlines()[-1], False
        print(f"{case:<15}{row}", flush=True)
        if not good:
            faults.append(case)
    if faults:
        raise CheckFailed(f"llama.cpp and lorawgpu disagree on {', '.join(faults)}")
    print("llama.cpp agrees with us")


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
