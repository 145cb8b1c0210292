"""Types that the gguf library cannot write: llama.cpp makes them, through llama-cpp-python, from a merged f16 file.

llama.cpp runs in a process of its own, because it ends the process where it fails.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export import gguf_merged
from lorawgpu.export.gguf_tensors import items_of, values_of
from lorawgpu.export.source import ExportSource
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.util.printable import printable
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint

# By llama.cpp's names; those that we can read back, and that need no importance matrix.
TYPES = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k")
# ||error|| / ||matrix||: about three times what each type does to normally distributed weights. A wrong order of rows
# gives 1.4.
LARGEST_ERROR = {"F16": 1e-3, "Q8_0": 0.02, "Q6_K": 0.06, "Q5_K": 0.12, "Q5_0": 0.15, "Q5_1": 0.15, "Q4_K": 0.25,
                 "Q4_0": 0.3, "Q4_1": 0.3, "IQ4_NL": 0.25, "IQ4_XS": 0.25, "Q3_K": 0.45, "Q2_K": 0.8}  # fmt: skip
THEIRS = """
import ctypes, os, sys
import llama_cpp
source, out, kind = sys.argv[1:]
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
sys.exit(int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(params)) != 0))
"""


def require(kind: str, out: Path, to: str, rest: list[str]) -> None:
    """UserError, with the lines that do it without, if llama-cpp-python is not installed.

    `rest`: the other arguments of the export.
    """
    if importlib.util.find_spec("llama_cpp") is not None:
        return
    half = out.with_name(f"{out.stem}-f16{out.suffix}")
    first = ["lorawgpu", "export", *rest, "--to", to, "--merged", "--quantize", "f16", "--out", half]
    if to == "ollama":
        whose = "Ollama"
        then = ["ollama", "create", out.name.lower(), "--quantize", kind, "-f", half / "Modelfile"]
    else:
        whose = "a llama.cpp that you have"
        files = [path if path.suffix == ".gguf" else path / gguf_merged.FILE for path in (half, out)]
        then = ["llama-quantize", *files, kind]
    raise UserError(
        f"--quantize {kind}: llama.cpp makes this type, and llama-cpp-python is not installed here. Install it, which "
        f"compiles llama.cpp, and run the command again:\n    pip install llama-cpp-python\nor let {whose} do it:\n"
        f"    {shlex.join(map(str, first))}\n    {shlex.join(map(str, then))}"
    )


def quantize(path: Path, kind: str) -> None:
    """Replace the GGUF file by one of this type. CheckFailed, with llama.cpp's last words, if it fails."""
    out = path.with_name(f"{path.name}.quantized")
    argv = [sys.executable, "-c", THEIRS, str(path), str(out), kind.upper()]
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode or not out.is_file():
        words = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-3:]
        raise CheckFailed(
            f"llama.cpp could not write {kind} (exit code {done.returncode}): {printable(' '.join(words))}"
        )
    os.replace(out, path)


def check_file(folder: Path, source: ExportSource) -> tuple[str, GgufCheckpoint]:
    """Open the file again and compare each tensor with base plus change, within what its type can do; returns a note,
    and the checkpoint."""
    checkpoint = GgufCheckpoint(folder / gguf_merged.FILE, str(folder / gguf_merged.FILE))
    lost = size = 0.0
    for item in items_of(source, "f16"):
        if not item.name:
            continue
        kind, want = checkpoint.file.tensors[item.plan.name].type, values_of(source, item).float32()
        got = checkpoint.file.read(item.plan.name)[0]
        got = widen(got, DENSE_TYPES[kind]) if kind in DENSE_TYPES else got
        error, norm = (float(np.square(x, dtype=np.float64).sum()) ** 0.5 for x in (got - want, want))
        if not error <= LARGEST_ERROR.get(kind, 0.0) * norm:
            raise CheckFailed(
                f"{gguf_merged.FILE}, read back: {item.plan.name} is not base plus change, rounded to {kind}"
            )
        lost, size = lost + error**2, size + norm**2
    rounding = (lost / (size or 1.0)) ** 0.5
    return f"read back: rounding moves the weights by {rounding:.1e} of their size", checkpoint
