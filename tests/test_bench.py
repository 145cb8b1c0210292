"""What the benchmarks write down, one table whose columns no run changes; and that a wrong kernel is not timed."""

import csv
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_case import GOLDEN

from lorawgpu.bench import training, turns
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.families.hf import from_hf
from lorawgpu.gpu import open_dry_device
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter
from lorawgpu.ops.matmul import Epilogue
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import SHAPES, empty_model, mix_of
from lorawgpu.weights.tensors import expected_tensors

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


def test_products_of_a_model_have_each_shape_once(bench_ops):
    assert bench_ops.fused(SHAPES["bitnet-2b"]) == {
        "qkv": (3840, 2560), "o": (2560, 2560), "gate_up": (13824, 2560), "down": (2560, 6912),
    }  # fmt: skip
    gemma = bench_ops.fused(SHAPES["gemma-4-e2b"])
    assert gemma["qkv"] == (10 * 256, 1536) and gemma["qkv 5120"] == (10 * 512, 1536)
    assert gemma["gate_up"] == (12288, 1536) and gemma["gate_up 24576"] == (24576, 1536)


@pytest.mark.parametrize("shape", ["gemma-4-e2b", "qwen3-0.6b", "qwen2.5-1.5b", "phi-4-mini"])
def test_the_row_kernels_of_a_model_are_right_at_its_widths(bench_ops, monkeypatch, device, kernels, capsys, shape):
    timed = bench_ops.ROW_KERNELS[shape](16)
    monkeypatch.setattr(bench_ops, "copy_rate", lambda device: 1e12)
    monkeypatch.setitem(bench_ops.ROW_KERNELS, shape, lambda tokens: timed)
    bench_ops.bench_rows(device, kernels, shape, 16)
    out = capsys.readouterr().out
    assert all(name in out for name, _, _ in timed)


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


def test_all_stores_of_all_shapes_take_turns(bench_train, monkeypatch, tmp_path, capsys):
    results = tmp_path / "results.csv"
    monkeypatch.setattr(bench_train, "append", lambda row, write=bench_train.append: write(row, results))
    options = ["--tokens", "32", "--seq", "16", "--seconds", "0", "--turn", "0", "--commit", "abc", "--csv"]
    monkeypatch.setattr("sys.argv", ["bench_train.py", "--shape", "tiny", "--store", "f32", "q4_0", *options])
    bench_train.main()
    with results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["shape"], row["store"], row["commit"]) for row in rows] == [
        ("tiny", s, "abc") for s in ("f32", "q4_0")
    ]
    for row in rows:
        ms, flop, rate = (float(row[name]) for name in ("ms", "tflop", "tile_tflop_s"))
        assert ms > 0 and flop >= 0 and rate >= 0 and float(row["over_tiles"]) > 0 and row["per_layer_ms"] == ""
    table = capsys.readouterr().out.split("32 tokens in sequences of 16")[1]
    assert table.count("tiny ") == 2


def test_per_layer_inputs_come_from_a_table(bench_train, monkeypatch, tmp_path, capsys):
    config = from_hf(json.loads((GOLDEN / "gemma4" / "config.json").read_text()))
    monkeypatch.setitem(bench_train.SHAPES, "small", config)
    rows = []
    monkeypatch.setattr(bench_train, "append", rows.append)
    options = ["--tokens", "16", "--seq", "16", "--seconds", "0", "--turn", "0", "--commit", "abc", "--csv"]
    options += ["--store", "bf16", "--checkpointing", "--table", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_train.py", "--shape", "small", *options])
    bench_train.main()
    assert rows[0]["per_layer_ms"] > 0 and "to gather and upload" in capsys.readouterr().out
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [97 * 7 * 10 * 2]


def test_the_first_round_does_not_count_and_the_last_fits_the_budget(monkeypatch):
    """Each turn takes one second of a clock of ours."""
    now, values = [0.0], {"a": iter(range(100, 0, -10)), "b": iter([7.0] * 9)}

    def turn(name):
        now[0] += 1.0
        return float(next(values[name]))

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    found = turns.rounds({name: lambda seconds, name=name: turn(name) for name in values}, 1.0, 9.0)
    assert now[0] == 8.0 and found == {"a": [90.0, 80.0, 70.0], "b": [7.0] * 3}  # four rounds
    assert turns.spread(found["a"]) == 0.25 and turns.spread(found["b"]) == 0.0


def operations_of(config, seq, tokens=64, checkpointing=False):
    device = open_dry_device()
    lora = LoraConfig(r=4, alpha=8, target_modules=config.all_linear())
    adapter = AdapterLayout(lora, config), init_adapter(lora, config, 0)
    options = Options(tokens, tokens, checkpointing=checkpointing)
    engine = Engine(device, empty_model(device, config, lambda name: "f32"), options, *adapter, AdamW())
    batch = training.random_batch(config, tokens, seq, np.random.default_rng(0))
    return turns.operations(engine.plan("train", tokens), batch, config.layers)


def test_a_step_counts_the_attention_that_its_sequences_need():
    """14 operations per visible pair, dimension and head: 4 forward, 10 backward."""
    config = SHAPES["tiny"]
    one, four = (operations_of(config, seq) for seq in (64, 16))
    pairs = 64 * 65 / 2 - 4 * 16 * 17 / 2
    assert one - four == pytest.approx(14 * pairs * 64 * 2, rel=1e-6)
    window = from_hf(CONFIGS["tiny"] | {"model_type": "mistral", "architectures": None, "sliding_window": 5})
    pairs = 64 * 65 / 2 - (5 * 6 / 2 + 59 * 5)
    assert one - operations_of(window, 64) == pytest.approx(14 * pairs * 64 * 2, rel=1e-6)


def test_a_step_counts_its_products_and_what_checkpointing_computes_again():
    """Products of the base: forward and dx, but not dx of the first projection; targets alone reach the head."""
    config = SHAPES["tiny"]
    attention = 14 * 64 * 65 / 2 * 64 * 2
    linear = {name: 2.0 * 64 * out * width for name, (out, width) in config.linear_shapes().items()}
    first = sum(size for name, size in linear.items() if name.endswith(("0.self_attn.q_proj", "0.self_attn.k_proj")))
    head = 2 * 2.0 * 64 * 320 * 64  # 63 targets in chunks of 64 rows
    base = 2 * sum(linear.values()) + head + attention
    once = operations_of(config, 64)
    assert base - 2 * first < once < 1.5 * base  # adapters of rank 4 beside widths of 64
    again = operations_of(config, 64, checkpointing=True) - once
    assert 0.3 * sum(linear.values()) < again < sum(linear.values())  # the first layer, but for its last projection


def test_a_table_of_per_layer_inputs_has_the_real_size_and_is_written_once(tmp_path):
    config = Namespace(per_layer_vocab=50, per_layer_input=6, num_hidden_layers=3)
    table = training.per_layer_table(tmp_path / "new", config)
    values = (table.astype(np.uint32) << 16).view(np.float32)
    assert table.shape == (50, 18) and np.isfinite(values).all() and len(np.unique(values)) > 100
    assert (0.5 <= np.abs(values)).all() and (np.abs(values) < 1).all()
    (path,) = (tmp_path / "new").iterdir()
    before = path.stat().st_mtime_ns
    assert np.array_equal(training.per_layer_table(tmp_path / "new", config), table)
    assert path.stat().st_mtime_ns == before and path.stat().st_size == 50 * 18 * 2


def test_a_gguf_of_random_blocks_is_a_model_that_loads(monkeypatch, tmp_path, device):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_load

    config = replace(SHAPES["smollm2-135m"], vocab_size=96, layers=SHAPES["smollm2-135m"].layers[:8])
    mix = mix_of(config, "q4_k_m")
    count = bench_load.write_gguf(tmp_path / "a.gguf", config, mix)
    bench_load.write_gguf(tmp_path / "hollow.gguf", config, mix, random=False)
    assert (tmp_path / "a.gguf").stat().st_size == (tmp_path / "hollow.gguf").stat().st_size
    memory = bench_load.HostMemory(device)
    with memory.watch():
        model = load_model(device, checkpoint := open_checkpoint(tmp_path / "a.gguf"))
    assert checkpoint.config.layers == config.layers and not checkpoint.widened()
    assert count == sum(map(math.prod, expected_tensors(config).values()))
    assert {part.store.name for part in model.layers[0].weights["qkv"].parts} == {"q5_0", "q8_0"}
    assert memory.peak < 1 << 30
