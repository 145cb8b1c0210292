"""A dry run reports the run's memory to the byte, and allocates and writes nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_case import GOLDEN
from tiny_run import byte_model, write_config

from lorawgpu.config.load import load_config
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.errors import DeviceError
from lorawgpu.files.atomic import marked
from lorawgpu.gpu import KernelCache, Plan, open_device, open_dry_device
from lorawgpu.gpu import device as gpu_device
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes
from lorawgpu.optim.adamw import AdamW
from lorawgpu.train import __main__ as train
from lorawgpu.train.placement import build_engine
from lorawgpu.train.setup import prepare
from lorawgpu.train.summary import plan_of
from lorawgpu.train.trainer import Trainer
from lorawgpu.weights.synthetic import SHAPES, empty_model, mix_of

CASES = {
    "dense": {"base_model": str(GOLDEN / "llama_dense"), "lora_dropout": 0.1},
    "packed": {"base_model": str(GOLDEN / "bitnet_packed"), "gradient_checkpointing": True},
    "master weights": {"base_model": str(GOLDEN / "bitnet_master"), "attn_implementation": "chain"},
    "blocks": {"base_model": str(GOLDEN / "llama_q4_k_m" / "model.gguf")},
    "8 bit": {"base_model": str(GOLDEN / "llama_dense"), "load_in_8bit": True},
    "4 bit": {"base_model": str(GOLDEN / "llama_dense"), "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitlinear": {"base_model": str(GOLDEN / "llama_bitlinear"), "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_it_counts_what_the_run_then_holds(tmp_path, device, kernels, keys):
    assert_same_memory(write_config(tmp_path, **keys), device, kernels)


def test_it_counts_the_sample_prompts_too(tmp_path, device, kernels):
    model = byte_model(tmp_path / "model")
    prompts = ["hello", "a much longer question than that, for which more rows are needed at once"]
    config = write_config(tmp_path, base_model=str(model), eval_steps=2, sample_prompts=prompts)
    assert_same_memory(config, device, kernels)


def assert_same_memory(config, device, kernels):
    run = prepare(load_config(config))
    device.memory.held.clear()
    real = Trainer(run, build_engine(run, device, kernels))
    dry = Trainer(run, build_engine(run, open_dry_device()))
    held = dict(real.engine.device.memory.held)
    counted = dict(dry.engine.device.memory.held)
    assert counted.pop("plan") >= held.pop("plan")  # the session's kernels existed before
    assert counted == held
    if real.samples.prompts:  # answering takes no more, but for the uniforms of another plan
        real.samples.answers()
        assert {**device.memory.held, "plan": 0} == {**held, "plan": 0}
    assert real.plan["limits"] == dry.plan["limits"] and real.plan["submits"] == dry.plan["submits"]


@pytest.mark.parametrize(("case", "words"), [
    ("blocks", "llama, blocks of q4_k, q6_k, 2 layers"),
    ("8 bit", "14 of 14 linear layers in q8_0 (8.5 bits a weight, rms error of normally distributed weights 0.5% of "
              "their deviation)"),
    ("4 bit", "12 of 14 linear layers in nf4 (4.5 bits a weight, rms error of normally distributed weights 9.2%"),
    ("packed", "bitnet, ternary, "),
])  # fmt: skip
def test_the_plan_says_how_weights_are_stored(tmp_path, case, words):
    run = prepare(load_config(write_config(tmp_path, **CASES[case])))
    assert words in plan_of(run, build_engine(run, open_dry_device()))["model"]


def tree(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Modification time and contents of a folder and everything in it."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes()) for path in paths}


@pytest.mark.parametrize("cached", [True, False])
def test_of_a_run_to_resume_it_writes_and_touches_nothing(tmp_path, capsys, runs, train_main, cached):
    """Not even to tidy up: the newest checkpoint is one whose replacement was cut short between its two renames."""
    config = write_config(tmp_path, max_steps=4, save_steps=2)
    folder = runs.train(config)
    replaced = marked(folder / "checkpoint-4", "replaced")
    (folder / "checkpoint-4").rename(replaced)
    shutil.copytree(folder / "checkpoint-2", marked(folder / "checkpoint-4", "partial"))
    if not cached:
        shutil.rmtree(tmp_path / "cache")
    before = tree(tmp_path)
    assert train_main([str(config), "--dry-run", "--resume", "--set", "max_steps=6"]) == 0
    assert f"resumed from {replaced}" in capsys.readouterr().out
    assert tree(tmp_path) == before
    assert train_main([str(config), "--resume", "--set", "max_steps=6"]) == 0  # a real run does tidy up
    assert {p.name for p in folder.glob("*checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert f"resumed from {folder / 'checkpoint-4'}" in capsys.readouterr().out


def test_it_names_settings_that_would_fit(tmp_path):
    run = prepare(load_config(write_config(tmp_path, micro_batch_size=8, sequence_len=32)))
    engine = build_engine(run, open_dry_device())
    with pytest.raises(DeviceError, match="It would fit with micro_batch_size"):
        build_engine(run, open_dry_device(budget=engine.device.memory.total * 9 // 10))


@pytest.mark.parametrize("open_it", [open_device, open_dry_device])
def test_activations_beyond_a_binding_name_settings_that_fit(tmp_path, open_it):
    """The guaranteed binding of 128 MiB holds 8,738 rows of BitNet-2B's queries, keys and values."""
    run = prepare(load_config(write_config(tmp_path, micro_batch_size=8, sequence_len=32)))
    device = open_it()
    device.limits = device.limits | {"max-storage-buffer-binding-size": 96 << 10}
    with pytest.raises(DeviceError, match=r"(?s)at once; .* allows 98,304.*It would fit with micro_batch_size"):
        build_engine(run, device)


@pytest.mark.parametrize("options", [{}, {"checkpointing": True, "dropout": 0.1}])
def test_within_the_guaranteed_limits_8b_takes_4096_rows(monkeypatch, options):
    """470 MB of gate and up, in blocks of 1,152 rows; smaller plans need no further buffer."""
    monkeypatch.setenv("LORAWGPU_LIMITS", "webgpu")
    config = replace(SHAPES["llama-3.1-8b"], layers=SHAPES["llama-3.1-8b"].layers[:2])
    device, lora = open_dry_device(), LoraConfig(16, 32, config.all_linear())
    model, layout = empty_model(device, config, mix_of(config, "q4_k_m")), AdapterLayout(lora, config)
    start = {name: np.zeros(shape, np.float32) for name, shape in adapter_shapes(lora, config).items()}
    engine = Engine(device, model, Options(4096, 4096, **options), layout, start, AdamW())
    held = device.memory.held["activations"]
    for rows in (3968, 2304, 1152, 128):
        engine.plan("train", rows)
    engine.plan("eval", 4096)
    assert device.memory.held["activations"] == held


@pytest.mark.parametrize("open_it", [open_device, open_dry_device])
def test_scores_of_the_chain_beyond_a_binding_name_flash_and_settings_that_fit(tmp_path, open_it):
    """Four heads x 256 rows x 256 slots x 4 bytes are the only thing above 512 KiB in this plan."""
    keys = {"micro_batch_size": 8, "sequence_len": 32}
    device = open_it()
    device.limits = device.limits | {"max-storage-buffer-binding-size": 512 << 10}
    build_engine(prepare(load_config(write_config(tmp_path, **keys))), device)
    run = prepare(load_config(write_config(tmp_path, **keys, attn_implementation="chain")))
    with pytest.raises(DeviceError, match=r"(?s)attn_implementation flash.*fit with micro_batch_size") as failed:
        build_engine(run, device)
    assert "bytes in one binding" in str(failed.value)


def test_the_plan_says_that_samples_are_longer_than_the_context(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama_dense", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    said = {}
    for model in (GOLDEN / "llama_dense", folder):
        run = prepare(load_config(write_config(tmp_path, base_model=str(model))))
        said[model] = plan_of(run, build_engine(run, open_dry_device()))["data"]
    assert "beyond the model's context of 8" in said[folder]
    assert "context" not in said[GOLDEN / "llama_dense"]


def test_a_clear_goes_a_binding_at_a_time(device):
    plan = Plan(device, KernelCache(device))
    tensor = device.upload(np.ones(1000, np.float32))
    whole, device.limits = device.limits, device.limits | {"max-storage-buffer-binding-size": 1024}
    with plan.section("s"):
        plan.clear(tensor)
    device.limits = whole
    assert len(plan.sections["s"]) == 4
    plan.run("s")
    assert not device.read(tensor).any()


def test_a_replay_starts_with_small_submits(device, monkeypatch):
    plan, sizes = Plan(device, KernelCache(device)), []
    tensor = device.upload(np.ones(64, np.float32))
    with plan.section("s"):
        plan.clear(tensor)
    plan.sections["s"] *= 900
    encode = plan.encode
    monkeypatch.setattr(plan, "encode", lambda records: sizes.append(len(records)) or encode(records))
    plan.run("s")
    assert sizes == [32, 64, 128, 256, 256, 164]


def test_it_refuses_what_a_device_would(tmp_path):
    device = open_dry_device()
    with pytest.raises(DeviceError, match="huge needs a buffer of"):
        device.tensor((device.limits["max-buffer-size"],), label="huge")
    plan = Plan(device, KernelCache(device))
    tensor = device.tensor((64,))
    with plan.section("s"), pytest.raises(ValueError, match="no buffer named"):
        plan.record("clear", "main", (1, 1), params={"count": 64, "stride": 256}, nonsense=tensor)


def test_without_any_adapter_it_plans_with_the_limits_that_are_guaranteed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_device.wgpu.gpu, "enumerate_adapters_sync", lambda: [])
    assert train.main([str(config := write_config(tmp_path)), "--dry-run", "--device", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "no GPU adapter here" in out and "planned with the limits that WebGPU guarantees" in out
    assert "max-storage-buffer-binding-size 128.0 MiB" in out and "MiB on the device" in out
    assert train.main([str(config)]) == 2 and "no GPU adapter found" in capsys.readouterr().err
