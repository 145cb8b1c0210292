"""Choosing an adapter, the limits requested, and memory."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import wgpu

from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu import Workspace, open_device
from lorawgpu.gpu import device as gpu_device
from lorawgpu.gpu.device import DEFAULT_LIMITS, Device, Memory, choose_adapter, list_adapters


def adapter(name, kind, backend="Vulkan"):
    return SimpleNamespace(
        info={"device": name, "adapter_type": kind, "backend_type": backend, "description": "driver 1.2"},
        limits={},
        features=set(),
    )


DISCRETE = adapter("NVIDIA H200", "DiscreteGPU")
INTEGRATED = adapter("Intel Iris", "IntegratedGPU")
CPU = adapter("llvmpipe", "CPU")
ALL = [DISCRETE, INTEGRATED, CPU]


def pretend(monkeypatch, *adapters):
    monkeypatch.setattr(gpu_device.wgpu.gpu, "enumerate_adapters_sync", lambda: list(adapters))


def test_adapters_are_ranked_and_opengl_is_left_out(monkeypatch):
    unknown = adapter("?", "Unknown", "Metal")
    pretend(monkeypatch, CPU, adapter("NVIDIA H200", "DiscreteGPU", "OpenGL"), unknown, INTEGRATED, DISCRETE)
    assert list_adapters() == [DISCRETE, INTEGRATED, unknown, CPU]


@pytest.mark.parametrize(
    "choice, expected, reason",
    [
        ("auto", DISCRETE, "the best of 3"),
        ("gpu", DISCRETE, "device gpu"),
        ("cpu", CPU, "device cpu"),
        ("1", INTEGRATED, "device 1"),
        ("iris", INTEGRATED, "contains 'iris'"),
        ("LLVM", CPU, "contains 'LLVM'"),
    ],
)
def test_a_choice_and_its_reason(choice, expected, reason):
    chosen, why = choose_adapter(choice, ALL)
    assert chosen is expected and reason in why


def test_auto_says_when_it_is_the_cpu():
    chosen, why = choose_adapter("auto", [CPU])
    assert chosen is CPU and "no GPU found" in why and "slow" in why


@pytest.mark.parametrize(
    "choice, adapters, message",
    [
        ("gpu", [CPU], "'gpu': no such adapter"),
        ("cpu", [DISCRETE], "'cpu': no such adapter"),
        ("3", ALL, "no adapter has that index"),
        ("²", ALL, "want auto, cpu, gpu, an index or a part of a name"),  # a digit, but not a number
        ("voodoo", ALL, "want auto, cpu, gpu, an index or a part of a name"),
        ("auto", [], "no GPU adapter found"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_list(choice, adapters, message):
    with pytest.raises(UserError) as refused:
        choose_adapter(choice, adapters)
    text = str(refused.value)
    assert message in text
    assert all(a.info["device"] in text for a in adapters)
    assert adapters or "mesa-vulkan-drivers" in text


def nothing(adapter, reason, limits, budget):
    """Replaces Device, to see the requested limits."""
    return limits


def test_the_environment_chooses_unless_the_option_does(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_device, "choose_adapter", lambda choice, *_: asked.append(choice) or (CPU, "why"))
    monkeypatch.setattr(CPU, "limits", dict.fromkeys(gpu_device.ADAPTER_LIMITS, 1 << 40))
    monkeypatch.setenv("LORAWGPU_DEVICE", "cpu")
    monkeypatch.delenv("LORAWGPU_LIMITS", raising=False)
    open_device(kind=nothing)
    open_device("1", kind=nothing)
    monkeypatch.delenv("LORAWGPU_DEVICE")
    open_device(kind=nothing)
    assert asked == ["cpu", "1", "auto"]


def test_limits(monkeypatch):
    """Two limits follow the adapter, below 2 GiB; the others are WebGPU's, and with `webgpu` all are."""
    monkeypatch.setattr(gpu_device, "choose_adapter", lambda *_: (CPU, "why"))
    monkeypatch.setattr(CPU, "limits", dict.fromkeys(gpu_device.ADAPTER_LIMITS, 1 << 40))
    monkeypatch.delenv("LORAWGPU_LIMITS", raising=False)
    asked = open_device(kind=nothing)
    assert {asked[k] for k in gpu_device.ADAPTER_LIMITS} == {gpu_device.BINDING_CEILING}
    assert {k: v for k, v in asked.items() if k not in gpu_device.ADAPTER_LIMITS} == {
        k: v for k, v in DEFAULT_LIMITS.items() if k not in gpu_device.ADAPTER_LIMITS
    }
    assert open_device(limits="webgpu", kind=nothing) == DEFAULT_LIMITS
    monkeypatch.setenv("LORAWGPU_LIMITS", "webgpu")
    assert open_device(kind=nothing) == DEFAULT_LIMITS
    monkeypatch.setenv("LORAWGPU_LIMITS", "most")
    with pytest.raises(UserError, match="LORAWGPU_LIMITS='most': want adapter or webgpu"):
        open_device(kind=nothing)


def test_the_device_has_the_limits_it_was_asked_for(device):
    granted = device.wgpu.limits
    assert granted["max-storage-buffers-per-shader-stage"] == 8
    assert granted["max-compute-workgroup-storage-size"] == 16384
    assert device.max_binding <= granted["max-storage-buffer-binding-size"] and device.max_binding % 256 == 0


def test_a_driver_that_refuses_is_a_device_error():
    def refuse(**_):
        raise RuntimeError("out of luck")

    broken = adapter("broken", "DiscreteGPU")
    broken.request_device_sync = refuse
    with pytest.raises(DeviceError, match="broken .*refused the device: out of luck"):
        Device(broken, "why", dict(DEFAULT_LIMITS))


def test_memory_is_counted_by_kind():
    memory = Memory(1000)
    memory.add("weights", 600)
    memory.add("activations", 300)
    assert memory.held == {"weights": 600, "activations": 300} and memory.total == 900
    with pytest.raises(DeviceError, match="out of GPU memory: logits needs 101 bytes, 900 of 1,000 are in use"):
        memory.check(101, "logits")


def test_a_budget_stops_what_the_adapter_would_grant():
    device = open_device(budget=1 << 20)
    device.tensor((1000,), label="small")
    with pytest.raises(DeviceError, match="huge needs 4,000,000 bytes"):
        device.tensor((1_000_000,), label="huge")


@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        ("activations", "lower sequence_len or micro_batch_size"),
        ("optimizer", "lower lora_r, or name fewer lora_target_modules"),
        ("kv cache", "shorten the context"),
        ("weights", "use a smaller model or another device"),
    ],
)
def test_a_buffer_beyond_the_limits_is_named_with_its_cure(device, kind, cure):
    held = device.memory.total
    with pytest.raises(DeviceError, match=f"everything needs a buffer of .*: {cure}"):
        device.buffer(1 << 42, "everything", kind)
    assert device.memory.total == held


def test_a_buffer_that_is_refused_is_not_counted(device, monkeypatch):
    def refuse(**_):
        raise RuntimeError("no room")

    held = device.memory.total
    monkeypatch.setattr(device, "wgpu", SimpleNamespace(create_buffer=refuse))
    with pytest.raises(DeviceError, match="out of GPU memory: everything needs 64 bytes: no room"):
        device.buffer(64, "everything", "other")
    assert device.memory.total == held


@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.int32, np.float16, np.uint16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 16)])
def test_what_is_uploaded_is_read_back(device, dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tensor = device.upload(array, "bf16" if dtype == np.uint16 else None)
    assert np.array_equal(device.read(tensor), array) and device.read(tensor).dtype == dtype
    device.write(tensor, array[::-1])
    assert np.array_equal(device.read(tensor), array[::-1])


def test_new_tensors_are_zero_and_wrong_writes_named(device):
    tensor = device.tensor((7, 3), label="weights of x")
    assert not device.read(tensor).any()
    for wrong in (np.zeros(20, np.float32), np.zeros((7, 3), np.float64)):
        with pytest.raises(ValueError, match="weights of x: cannot write"):
            device.write(tensor, wrong)


def test_views_keep_inside_and_aligned(device):
    tensor = device.upload(np.arange(256, dtype=np.float32).reshape(4, 64), label="t")
    assert np.array_equal(device.read(tensor.rows(1, 3)), np.arange(64, 192, dtype=np.float32).reshape(2, 64))
    for start, shape in ((1, (2,)), (192, (65,))):
        with pytest.raises(ValueError, match="unaligned or outside"):
            tensor.view(start, shape)


def test_the_workspace_reuses_what_was_given_back(device):
    work = Workspace(device, kind="test scratch")
    a = work.take((100, 16), label="a")
    work.give(a)
    b = work.take((90, 16), label="b")
    assert b.buffer is a.buffer
    c = work.take((90, 16), label="c")
    assert c.buffer is not a.buffer
    with pytest.raises(ValueError, match="a was not taken"):
        work.give(c, a, a)
    held = device.memory.held["test scratch"]
    work.rewind()
    small = [work.take((8, 16)) for _ in range(2)]  # a smaller plan creates no buffer, however oversized the old ones
    assert {id(t.buffer) for t in small} == {id(a.buffer), id(c.buffer)}
    assert device.memory.held["test scratch"] == held


def test_a_frugal_workspace_gives_a_small_tensor_a_large_buffer(device):
    work = Workspace(device, kind="test scratch")
    large = work.take((100, 16), label="large")
    work.give(large)
    with work.reuse_only():
        assert (small := work.take((8, 16), label="small")).buffer is large.buffer
    work.give(small)
    assert work.take((8, 16), label="small").buffer is not large.buffer


def test_an_error_of_a_dispatch_is_raised(plan, device):
    """Encoding bypasses wgpu-py's own checks."""
    with plan.section("bad"):
        plan.clear(device.tensor((64,)))
    plan.sections["bad"] = [replace(plan.sections["bad"][0], grid=(1 << 20, 1, 1))]
    with pytest.raises(wgpu.GPUValidationError, match="dispatch"):
        plan.run("bad")


@pytest.mark.parametrize(
    "choice, code, text", [("voodoo", 2, "LORAWGPU_DEVICE: device 'voodoo': want auto"), ("99", 2, "no adapter has")]
)
def test_commands_take_the_device_from_the_environment(choice, code, text):
    case = os.path.join(os.path.dirname(__file__), "golden", "bitnet_q_only")
    env = {**os.environ, "LORAWGPU_DEVICE": choice}
    done = subprocess.run(
        [sys.executable, "-m", "lorawgpu.verify", case], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr


def test_who_named_the_device_is_said(monkeypatch):
    monkeypatch.setenv("LORAWGPU_DEVICE", "voodoo")
    pretend(monkeypatch, CPU)
    for given, begin in ((None, "LORAWGPU_DEVICE: device 'voodoo'"), ("banshee", "device 'banshee'")):
        with pytest.raises(UserError) as refused:
            open_device(given)
        assert str(refused.value).startswith(begin)
    pretend(monkeypatch)
    with pytest.raises(UserError, match="^no GPU adapter found"):
        open_device()


def test_bytes_are_counted_in_plain_integers():
    """NumPy integers in shapes must not leak into metrics, which are JSON."""
    memory = Memory()
    memory.add("other", np.int64(8))
    assert type(memory.held["other"]) is int
