"""What the benchmarks write down: one table, whose columns no run changes."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench_train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_train

    return bench_train


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
