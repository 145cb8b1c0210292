"""A dry run says what the run will take, to the byte, and takes nothing."""

import pytest
from golden_case import GOLDEN
from tiny_run import byte_model, write_config

from lorawgpu.config import load_config
from lorawgpu.errors import DeviceError
from lorawgpu.gpu import KernelCache, Plan, open_dry_device
from lorawgpu.run import build_engine, prepare
from lorawgpu.trainer import Trainer

CASES = {
    "dense": {"base_model": str(GOLDEN / "llama_dense"), "lora_dropout": 0.1},
    "packed": {"base_model": str(GOLDEN / "bitnet_packed"), "gradient_checkpointing": True},
    "master weights": {"base_model": str(GOLDEN / "bitnet_master"), "attn_implementation": "chain"},
    "bitlinear": {"base_model": str(GOLDEN / "llama_bitlinear"), "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_it_counts_what_the_run_then_holds(tmp_path, device, kernels, keys):
    assert_same_memory(write_config(tmp_path, **keys), device, kernels)


def test_it_counts_the_sample_prompts_too(tmp_path, device, kernels):
    model = byte_model(tmp_path / "model")
    config = write_config(tmp_path, base_model=str(model), eval_steps=2, sample_prompts=["hello"])
    assert_same_memory(config, device, kernels)


def assert_same_memory(config, device, kernels):
    run = prepare(load_config(config))
    device.memory.held.clear()
    real = Trainer(run, build_engine(run, device, kernels))
    dry = Trainer(run, build_engine(run, open_dry_device()))
    held = dict(real.engine.device.memory.held)
    counted = dict(dry.engine.device.memory.held)
    assert counted.pop("plan") >= held.pop("plan")  # kernels of the session were there before
    assert counted == held
    assert real.plan["limits"] == dry.plan["limits"] and real.plan["submits"] == dry.plan["submits"]


def test_it_names_settings_that_would_fit(tmp_path):
    run = prepare(load_config(write_config(tmp_path, micro_batch_size=8, sequence_len=32)))
    engine = build_engine(run, open_dry_device())
    with pytest.raises(DeviceError, match="It would fit with micro_batch_size"):
        build_engine(run, open_dry_device(budget=engine.device.memory.total * 9 // 10))


def test_it_refuses_what_a_device_would(tmp_path):
    device = open_dry_device()
    with pytest.raises(DeviceError, match="huge needs a buffer of"):
        device.tensor((device.limits["max-buffer-size"],), label="huge")
    plan = Plan(device, KernelCache(device))
    tensor = device.tensor((64,))
    with plan.section("s"), pytest.raises(ValueError, match="no buffer named"):
        plan.record("clear", "main", (1, 1), params={"count": 64, "stride": 256}, nonsense=tensor)
