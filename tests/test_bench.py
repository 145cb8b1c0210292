"""What the benchmarks write down, one table whose columns no run changes; and that a wrong kernel is not timed."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from lorawgpu.ops.matmul import Epilogue

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench_train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_train

    return bench_train


@pytest.fixture
def bench_ops(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_ops

    return bench_ops


def test_the_table_has_the_columns_that_are_written(bench_train):
    with bench_train.RESULTS.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == bench_train.COLUMNS
    assert rows and all(len(row) == len(header) for row in rows)


def test_a_row_goes_under_its_columns_whatever_its_order(bench_train, tmp_path):
    path = tmp_path / "results.csv"
    bench_train.append({"ms": 1.5, "date": "2000-01-01"}, path)
    bench_train.append({"date": "2000-01-02", "peer_float32_gib": 3, "adapter": "a, b"}, path)
    with pytest.raises(ValueError, match="peer_float8"):
        bench_train.append({"date": "2000-01-03", "peer_float8_gib": 1}, path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{k: v for k, v in row.items() if v} for row in rows] == [
        {"date": "2000-01-01", "ms": "1.5"},
        {"date": "2000-01-02", "adapter": "a, b", "peer_float32_gib": "3"},
    ]


@pytest.mark.parametrize("kind", ["ternary", "ternary_t", "bf16", "bf16_t", "f32"])
def test_a_right_product_is_timed_and_a_wrong_one_is_not(bench_ops, monkeypatch, device, kernels, kind):
    right, timed = bench_ops.tiled.record, []
    monkeypatch.setattr(bench_ops, "seconds", lambda device, run: timed.append(kind) or 1.0)

    def case():
        return bench_ops.case(device, kernels, kind, 32, 64, 64)

    assert case()[1] <= bench_ops.TOLERANCE and timed == [kind]

    def wrong(plan, problem, tile):
        right(plan, replace(problem, epilogue=Epilogue(alpha=1.0001)), tile)

    monkeypatch.setattr(bench_ops.tiled, "record", wrong)
    with pytest.raises(SystemExit, match=f"{kind} product of 32 x 64 x 64.* is off by 1.0e-04"):
        case()
    assert timed == [kind]


def test_a_product_of_nan_is_wrong(bench_ops):
    with pytest.raises(SystemExit, match="off by nan"):
        bench_ops.require_correct(float("nan"), "y")


def test_without_a_warmup_there_are_ceilings_too(bench_ops, monkeypatch, capsys):
    monkeypatch.setattr(bench_ops, "seconds", lambda device, run: 1.0)
    monkeypatch.setattr("sys.argv", ["bench_ops.py", "--warmup", "0", "--kinds"])
    bench_ops.main()
    assert "'fma_loop': " in capsys.readouterr().out


def test_a_window_is_compared_with_sequences_of_twice_its_size(bench_ops, monkeypatch, device, capsys):
    monkeypatch.setattr(bench_ops, "WINDOWED", {"tiny": (1, 1, 8)})
    monkeypatch.setattr(bench_ops.bench_attention.Bench, "time", lambda self, plan, section: 1.0)
    bench_ops.bench_window(device, "tiny", 1100)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("ratio" in line for line in lines)


def test_a_peer_has_a_dtype(bench_train, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_train.py", "--peer"])
    with pytest.raises(SystemExit):
        bench_train.main()
    assert "--peer: expected at least one argument" in capsys.readouterr().err
