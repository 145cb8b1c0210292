"""`lorawgpu bench`: what it measures here, the line that it prints, and two lines side by side."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lorawgpu.bench import __main__ as bench
from lorawgpu.bench import products
from lorawgpu.bench.report import compared, line_of, read_report
from lorawgpu.bench.training import BenchSettings, needed_bytes
from lorawgpu.errors import DeviceError
from lorawgpu.ops.matmul import Epilogue, tiled

SMALL = ["--shape", "tiny", "--tokens", "32", "--seq", "16", "--seconds", "0", "--turn", "0.001", "--rank", "4"]
TRAINING = {"shape": "tiny", "tokens": 32, "seq": 16, "rank": 4, "store": "bf16", "checkpointing": False}
REPORT = {
    "adapter": "A (DiscreteGPU, Vulkan)", "driver": "1", "copy_gb_s": 100.0,
    "products": [{"kind": "f32", "size": [64, 64, 64], "tflop_s": 2.0}],
    "trainings": [TRAINING | {"tok_s": 1000, "spread": 0.01}],
}  # fmt: skip


@pytest.fixture
def few(monkeypatch, device, kernels):
    """The command with one kind of product and two tiles, on the session's device."""
    monkeypatch.setattr(bench, "open_device", lambda choice: device)
    monkeypatch.setattr(bench, "KernelCache", lambda device: kernels)
    monkeypatch.setattr(products, "KINDS", ("f32",))
    monkeypatch.setattr(products, "ROUNDS", 2)
    monkeypatch.setattr(products, "TILES", ("flat", "low"))
    monkeypatch.setitem(bench.SOFTWARE, "product", (16, 64, 64))


def test_what_it_prints_is_what_it_compares_with(few, capsys, tmp_path):
    path = tmp_path / "other.txt"
    path.write_text(line_of(REPORT))
    assert bench.main([*SMALL, "--compare", str(path)]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    (training,) = report["trainings"]
    assert {name: training[name] for name in TRAINING} == TRAINING and training["tok_s"] > 0
    assert "tiny bf16: 1 samples, apart by 0.0% of their median" in out and "in sequences of 16, r = 4" in out
    assert [r["kind"] for r in report["products"]] == ["f32", "f32^T"] and report["copy_gb_s"] > 0
    assert all(r["best_tflop_s"] >= r["tflop_s"] > 0 and r["tile"] == "flat" for r in report["products"])
    assert f"compared with {REPORT['adapter']}, driver 1" in out and "tok/s    there        1,000" in out
    path.write_text(out)
    assert read_report(path) == report and len(compared(report, report)) == 5


def test_a_wrong_product_has_no_rate(monkeypatch, device, kernels):
    right = tiled.record
    halved = Epilogue(alpha=0.5)
    monkeypatch.setattr(products.tiled, "record", lambda plan, p, tile: right(plan, replace(p, epilogue=halved), tile))
    assert np.isnan(products.Product(device, kernels, "f32", 16, 64, 64).rate("flat", 0.0))


def test_a_difference_is_judged_by_the_noise_of_both():
    other = json.loads(json.dumps(REPORT))
    other["trainings"][0] |= {"tok_s": 1015, "spread": 0.01}
    other["copy_gb_s"], other["products"][0]["tflop_s"] = 50.0, 4.0
    lines = compared(REPORT, other)
    assert lines[1].split() == ["copy", "100", "GB/s", "there", "50", "2.00x"]
    assert lines[2].split() == ["f32", "product", "2", "TFLOP/s", "there", "4", "0.50x"]
    assert lines[3].endswith("0.99x, within the noise of 2.0%")
    other["trainings"][0]["tok_s"] = 1100
    assert compared(REPORT, other)[3].endswith("0.91x, beyond the noise of 2.0%")
    other["trainings"][0]["rank"] = 8
    assert len(compared(REPORT, other)) == 3
    assert "nothing in common" in compared(REPORT, {"adapter": "B", "products": [], "trainings": []})[1]


@pytest.mark.parametrize("garbage", [
    {"products": [None, {"kind": "f32"}, {"kind": "f32", "size": ["64"], "tflop_s": 1},
                  {"kind": "f32", "size": [64, 64, 64], "tflop_s": 0}]},
    {"trainings": [3, {}, TRAINING, TRAINING | {"tok_s": 0, "spread": 0}, TRAINING | {"tok_s": "x", "spread": 0}]},
    {"copy_gb_s": "fast"},
])  # fmt: skip
def test_what_a_foreign_line_leaves_open_is_not_compared(garbage):
    line = {"adapter": "B", "products": [], "trainings": []} | garbage
    assert "nothing in common" in compared(REPORT, line)[1]


def test_the_last_line_of_a_file_counts(tmp_path):
    path = tmp_path / "lines.txt"
    lines = [line_of(REPORT | {"adapter": name}) for name in "AB"]
    path.write_text("\n".join(["tiny bf16", *lines, "{", '{"lorawgpu_bench":1}', '{"lorawgpu_bench":2,"adapter":"C"}']))
    assert read_report(path)["adapter"] == "B"


@pytest.mark.parametrize("text", [None, "", "nothing", "[" * 100_000, '{"lorawgpu_bench":1,"adapter":"A"}'])
def test_a_file_without_a_line_is_one_message(tmp_path, capsys, text):
    path = tmp_path / "lines.txt"
    if text is not None:
        path.write_text(text)
    assert bench.main(["--compare", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(path) in error and error.count("\n") == 1


@pytest.mark.parametrize(("options", "words"), [
    (["--tokens", "100", "--seq", "64"], "a multiple of --seq 64"),
    (["--rank", "0"], "--rank 0: wanted a whole number above 0"),
    (["--tokens", "-5"], "--tokens -5"), (["--shape", "llama"], "invalid choice: 'llama'"),
])  # fmt: skip
def test_sizes_that_make_no_step_are_refused(few, capsys, options, words):
    assert bench.main(options) == 2
    assert words in capsys.readouterr().err


def test_shapes_that_do_not_fit_are_left_out(few, monkeypatch, device, capsys):
    sizes = {"smollm2-135m": 1 << 30, "smollm2-360m": 3 << 30}

    def needed(settings, name, store):
        if name not in sizes:
            raise DeviceError("lm_head needs a buffer of 9 bytes")
        return sizes[name]

    monkeypatch.setattr(type(device), "is_cpu", False)
    monkeypatch.setattr(bench, "needed_bytes", needed)
    monkeypatch.setattr(bench, "free_memory", lambda: 2 << 30)
    assert bench.shapes_that_fit(BenchSettings(), device, ["bf16"]) == ["smollm2-135m"]
    out = capsys.readouterr().out
    assert "smollm2-360m is left out: it needs 3.0 GiB of 2.0 that are free" in out
    assert "bitnet-2b is left out: lm_head needs" in out
    monkeypatch.setattr(bench, "free_memory", lambda: None)
    assert bench.shapes_that_fit(BenchSettings(), device, ["bf16"]) == ["smollm2-135m", "smollm2-360m"]


def test_the_memory_of_a_shape_is_that_of_its_plan():
    """TinyLlama: 1.1e9 parameters in bf16; adapters of rank 8 with gradients and moments take 16 bytes a parameter."""
    few, many = (needed_bytes(BenchSettings(512, 512, rank), "tinyllama-1.1b", "bf16") for rank in (8, 16))
    weights = 2 * 1_100_048_384
    adapter = 16 * 8 * 22 * (4 * 2048 * 2 - 2 * 1792 + 3 * (2048 + 5632))
    assert weights + adapter < few < weights + adapter + (3 << 29) and 0.9 * adapter < many - few < 1.1 * adapter
