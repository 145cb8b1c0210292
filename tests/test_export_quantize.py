"""`export --quantize q4_k_m` through llama-cpp-python, and `--data`: what an export does to the held-out loss."""

import json
import re
import sys

import pytest
from exports import DENSE, export
from golden_case import GOLDEN, reference_case
from test_evaluate import write_case
from test_export_gguf_merged import with_tokenizer

from lorawgpu.errors import CheckFailed
from lorawgpu.export import gguf_merged, llama_quantize
from lorawgpu.export.source import open_source

# Copies the file, as llama.cpp's function of this name would with a type that changes nothing.
LLAMA_CPP = """
import ctypes, shutil
class Params(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int)]
LLAMA_FTYPE_MOSTLY_Q4_K_M = 15
llama_backend_init = lambda: None
llama_model_quantize_default_params = Params
def llama_model_quantize(source, out, params):
    assert params._obj.ftype == 15
    {body}
"""


def pretend(folder, monkeypatch, body):
    """A module `llama_cpp` for the process that quantizes."""
    (folder / "llama_cpp.py").write_text(LLAMA_CPP.format(body=body))
    monkeypatch.setenv("PYTHONPATH", f"{folder}")


@pytest.mark.parametrize("to, out, last", [
    ("gguf", "m.gguf", "llama-quantize {t}/m-f16.gguf {t}/m.gguf q4_k_m"),
    ("gguf", "m", "llama-quantize {t}/m-f16/model.gguf {t}/m/model.gguf q4_k_m"),
    ("ollama", "M", "ollama create m --quantize q4_k_m -f {t}/M-f16/Modelfile"),
])  # fmt: skip
def test_without_llama_cpp_the_message_has_the_lines_that_do_it(tmp_path, capsys, monkeypatch, to, out, last):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(llama_quantize.importlib.util, "find_spec", lambda name: None)
    line = ["--adapter", DENSE / "adapter_init", "--model", DENSE, "--to", to, "--merged", "--quantize", "q4_k_m"]
    assert export(*line, "--out", tmp_path / out) == 2
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert "pip install llama-cpp-python" in lines and lines[-1] == last.format(t=tmp_path)
    half = tmp_path / out.replace("m.gguf", "m-f16.gguf") if "." in out else tmp_path / f"{out}-f16"
    told = lines[-2].split()
    assert told[:2] == ["lorawgpu", "export"] and told[-1] == str(half) and not list(tmp_path.iterdir())
    assert told[2:-1] == [*map(str, line[:-1]), "f16", "--out"]


def test_the_file_of_llama_cpp_replaces_ours_if_it_holds_the_model(tmp_path, monkeypatch):
    base = with_tokenizer("llama_dense", tmp_path / "base")
    source = open_source(str(base / "adapter_init"), str(base), True)
    out, file = tmp_path / "out", tmp_path / "out" / gguf_merged.FILE
    out.mkdir()
    gguf_merged.write(out, source, "f16")
    before = file.read_bytes()
    pretend(tmp_path, monkeypatch, "shutil.copyfile(source, out); return 0")
    llama_quantize.quantize(file, "q4_k_m")
    assert [path.name for path in out.iterdir()] == [file.name] and file.read_bytes() == before
    assert "rounding moves the weights by" in llama_quantize.check_file(out, source)[0]
    wrong = bytearray(before)
    tensor = gguf_merged.GgufCheckpoint(file, "m").file.tensors["blk.0.attn_q.weight"]
    values = wrong[tensor.offset : tensor.offset + tensor.nbytes]
    row = tensor.nbytes // tensor.shape[0]
    wrong[tensor.offset : tensor.offset + tensor.nbytes] = values[row:] + values[:row]
    file.write_bytes(wrong)
    with pytest.raises(CheckFailed, match="blk.0.attn_q.weight is not base plus change, rounded to F16"):
        llama_quantize.check_file(out, source)


@pytest.mark.parametrize("body", ["sys.exit(4)", "return 1", "import os; os.abort()", "return 0"])
def test_llama_cpp_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch, body):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"ours")
    pretend(tmp_path, monkeypatch, f"import sys; print('bad\\x1b[2J tensor', file=sys.stderr, flush=True); {body}")
    with pytest.raises(CheckFailed, match=r"llama.cpp could not write q4_k_m .exit code .*: bad\\x1b\[2J tensor"):
        llama_quantize.quantize(file, "q4_k_m")
    assert file.read_bytes() == b"ours"


def test_llama_cpp_writes_k_quants(tmp_path, capsys):
    pytest.importorskip("llama_cpp")
    base = with_tokenizer("llama_dense", tmp_path / "base")
    line = ["--adapter", base / "adapter_init", "--model", base, "--to", "gguf", "--merged"]
    for kind in llama_quantize.TYPES:
        assert export(*line, "--quantize", kind, "--out", tmp_path / f"{kind}.gguf") == 0
        assert "rounding moves the weights by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "to", "options"),
    [("llama_dense", "merged", []), ("llama_q8_0", "gguf", ["--merged"]), ("llama_q8_0", "peft", [])],
)
def test_the_held_out_loss_of_base_adapter_and_export(tmp_path, capsys, case, to, options):
    """The adapter's loss is that of transformers and PEFT; rounding to the base's type takes little of its effect."""
    folder, golden = GOLDEN / case, reference_case(case)
    data = write_case(case, tmp_path / "d.jsonl")
    model = folder / "model.gguf" if "q8_0" in case else folder
    line = ["--adapter", folder / "adapter_init", "--model", model, "--data", data, "--to", to, *options]
    assert export(*line, "--out", tmp_path / "out") == 0
    said = re.search(
        r"held-out loss \((\d+) target tokens\): base ([\d.]+), with the adapter ([\d.]+), exported ([\d.]+) \((.*)\)",
        capsys.readouterr().out,
    )
    tokens, base, ours, theirs, change = map(float, said.groups())
    assert tokens == golden.batch.targets
    assert ours == pytest.approx(golden.expected["loss"].item(), abs=2e-4)
    assert abs(theirs - ours) <= (2e-4 if to == "peft" else abs(base - ours) / 5) and abs(base - ours) > 1e-2
    assert change == pytest.approx(theirs - ours, abs=1.1e-4)


def test_data_that_cannot_be_used_stop_an_export_before_it_writes(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"input_ids": [10**6, 1]}) + "\n")
    line = ["--adapter", DENSE / "adapter_init", "--model", DENSE, "--to", "peft", "--out", tmp_path / "out"]
    assert export(*line, "--data", bad) == 2 and "line 1" in capsys.readouterr().err
    ternary = GOLDEN / "bitnet_packed"
    line = ["--adapter", ternary / "adapter_init", "--model", ternary, "--to", "merged", "--dequantize"]
    assert export(*line, "--data", bad, "--out", tmp_path / "out") == 2
    assert "--data: dequantized ternary weights are another model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [bad.name]
