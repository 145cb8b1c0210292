"""Runs on a failing device or disk: too little memory, a lost device, a full disk; and memory that stays flat."""

import math
import resource

import pytest
from tiny_run import write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.errors import DeviceError
from lorawgpu.gpu import open_device
from lorawgpu.train.placement import build_engine
from lorawgpu.train.setup import prepare
from lorawgpu.train.trainer import Trainer


def test_a_plan_that_does_not_fit_names_settings_that_do(tmp_path):
    device = open_device()
    run = prepare(load_config(write_config(tmp_path, micro_batch_size=8, sequence_len=32)))
    build_engine(run, device)
    needed = device.memory.total
    with pytest.raises(DeviceError) as failed:
        build_engine(run, open_device(budget=needed - (needed - weights_of(device)) // 3))
    message = str(failed.value)
    assert "out of GPU memory" in message and "It would fit with micro_batch_size" in message
    with pytest.raises(DeviceError, match="Not even one short sample fits"):
        build_engine(run, open_device(budget=weights_of(device) + 200_000))


def weights_of(device) -> int:
    return device.memory.held["weights"]


def test_a_lost_device_ends_the_run_naming_what_was_saved(tmp_path):
    class Unplugged(Trainer):
        def _step(self, batch):
            if self.state.step == 5:
                self.engine.device.wgpu.destroy()
            super()._step(batch)

    run = prepare(load_config(write_config(tmp_path, save_steps=2)))
    with pytest.raises(DeviceError, match=r"(?s)the device was lost.*last good checkpoint is .*checkpoint-4;"):
        Unplugged(run, build_engine(run, open_device())).train()


def test_memory_that_runs_out_ends_the_run_naming_what_was_saved(tmp_path):
    class Crowded(Trainer):
        def _step(self, batch):
            if self.state.step == 5:  # another program took the rest, and a new plan needs buffers
                self.engine.device.memory.budget = self.engine.device.memory.total
                self.engine.plan("logits", 16)
            super()._step(batch)

    run = prepare(load_config(write_config(tmp_path, save_steps=2)))
    with pytest.raises(DeviceError, match=r"(?s)out of GPU memory: .*last good checkpoint is .*checkpoint-4;"):
        Crowded(run, build_engine(run, open_device())).train()


def test_submits_are_sized_by_the_measured_rate(tmp_path, runs):
    trainer = runs.trainer(write_config(tmp_path, max_steps=3, max_dispatch_ms=1))
    assert trainer.train() == 0
    limit = trainer.engine.options.flops_per_submit
    assert 0 < limit < math.inf
    assert {r.plan.flops_per_submit for r in trainer.engine._plans.values()} == {limit}


@pytest.mark.long
def test_memory_stays_flat_over_500_steps(tmp_path, runs):
    class Weighed(Trainer):
        sizes = []

        def _step(self, batch):
            super()._step(batch)
            if self.state.step in (100, 500):
                self.sizes.append((resident_bytes(), self.engine.device.memory.total))

    data = write_data(tmp_path / "d.jsonl", samples=50, longest=30)
    config = write_config(tmp_path, datasets=[{"path": str(data)}], max_steps=500, save_steps=50, logging_steps=5,
                          lora_dropout=0.1, gradient_accumulation_steps=2)  # fmt: skip
    runs.train(config, kind=Weighed)
    (host_before, gpu_before), (host_after, gpu_after) = Weighed.sizes
    assert gpu_after == gpu_before
    assert host_after < host_before + (16 << 20)  # 40 KiB a step would show


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_full_disk_ends_the_run_naming_what_was_saved(tmp_path, capsys, monkeypatch, train_main):
    from lorawgpu.train import checkpoint

    real = checkpoint.write_synced

    def full(path, data):
        if "checkpoint-4" in str(path):
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    config = write_config(tmp_path, save_steps=2)
    assert train_main([str(config)]) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and "The last good checkpoint is" in err and "/checkpoint-2;" in err
    monkeypatch.undo()
    assert train_main([str(config), "--resume"]) == 0
