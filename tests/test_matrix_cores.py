"""Whether matrix cores are used: whatever a runtime, a driver or the cache does, training goes on without them."""

import json
import time
from types import SimpleNamespace

import pytest

from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu import device as gpu_device
from lorawgpu.gpu import matrix_cores, open_device
from lorawgpu.gpu.capabilities import MatrixCores

INFO = {"vendor_id": 1, "device_id": 2, "device": "card", "description": "driver 1", "backend_type": "Vulkan"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path))
    monkeypatch.delenv(matrix_cores.CHOICE, raising=False)
    return tmp_path / matrix_cores.MEMORY_FILE


@pytest.fixture
def child(monkeypatch):
    """`child(CODE)`: the trial's process runs this Python instead."""
    return lambda code: monkeypatch.setattr(matrix_cores, "TRIAL", ("-c", code))


def found(monkeypatch, here=32):
    """What `found_cores` says of a device whose trial in this process gives `here` lanes."""
    monkeypatch.setattr(matrix_cores, "trial", lambda device, tile: here)
    return matrix_cores.found_cores(SimpleNamespace(adapter=SimpleNamespace(info=INFO)), 0)


def test_the_answer_of_a_trial_is_kept(monkeypatch, child, cache):
    child("print('a driver talks'); print('{\"tile\": 16, \"lanes\": 32}')")
    assert found(monkeypatch) == (MatrixCores(16, 32), "tiles of 16, subgroups of 32")
    child("raise SystemExit(1)")  # not run again
    assert found(monkeypatch)[0] == MatrixCores(16, 32)
    assert list(json.loads(cache.read_text()).values()) == [{"tile": 16, "lanes": 32}]


def test_another_driver_is_tried_anew(monkeypatch, child):
    child('print(\'{"tile": 16, "lanes": 32}\')')
    found(monkeypatch)
    monkeypatch.setitem(INFO, "description", "driver 2")
    child('print(\'{"reason": "no product was exact"}\')')
    assert found(monkeypatch) == (None, "no product was exact")


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; os.abort()", "ended with code -6"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("import time; time.sleep(60)", "did not end: TimeoutExpired"),
        ("pass", "no answer"),
        ("print('[]')", "no answer"),
        ('print(\'{"tile": 7, "lanes": 32}\')', "no answer"),
        ('print(\'{"tile": 16, "lanes": [32]}\')', "no answer"),
    ],
)
def test_a_trial_that_dies_or_talks_nonsense_is_a_no(monkeypatch, child, code, reason):
    monkeypatch.setattr(matrix_cores, "TRIAL_SECONDS", 2)
    child(code)
    cores, why = found(monkeypatch)
    assert cores is None and reason in why


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"%s": 5}', '{"%s": {"tile": 16, "lanes": 1}}'])
def test_a_broken_cache_is_not_believed(monkeypatch, child, cache, text):
    cache.write_text(text.replace("%s", matrix_cores._key(INFO)))
    child('print(\'{"tile": 8, "lanes": 32}\')')
    assert found(monkeypatch)[0] == MatrixCores(8, 32)


@pytest.mark.parametrize("here", [None, 64])
def test_a_cache_that_lies_is_noticed(monkeypatch, child, cache, here):
    """The product is computed in this process too; a driver may have been replaced under its name."""
    cache.write_text(json.dumps({matrix_cores._key(INFO): {"tile": 16, "lanes": 32}}))
    child("raise SystemExit(1)")
    cores, why = found(monkeypatch, here)
    assert cores is None and "wrong results" in why


def test_a_refusal_costs_little_and_leaves_todays_kernels(device, monkeypatch, child):
    """Stock wgpu lists the feature and refuses it. A device is opened without it, and nothing is tried."""
    child("raise SystemExit('not to be run')")
    opened, whole = [], gpu_device.Device

    class Refusing(whole):
        def _open(self):
            opened.append(self.features)
            if set(matrix_cores.FEATURES) <= set(self.features):
                raise DeviceError("experimental features are not enabled")
            self.wgpu, self.queue = device.wgpu, device.queue

    monkeypatch.setattr(gpu_device, "Device", Refusing)
    monkeypatch.setattr(gpu_device, "offered", lambda adapter: True)
    began = time.perf_counter()
    got = open_device(kind=Refusing)
    assert time.perf_counter() - began < 5  # listing adapters included
    assert got.matrix is None and "does not grant them" in got.matrix_note and len(opened) == 2
    assert open_device(kind=Refusing, matrix_cores="off").matrix is None and len(opened) == 3


def test_a_device_with_matrix_cores_says_so_to_the_kernels(device, monkeypatch):
    class Granting(gpu_device.Device):
        def _open(self):
            self.wgpu, self.queue = device.wgpu, device.queue

    monkeypatch.setattr(gpu_device, "Device", Granting)
    monkeypatch.setattr(gpu_device, "offered", lambda adapter: True)
    monkeypatch.setattr(gpu_device, "found_cores", lambda device, index: (MatrixCores(16, 32), "tiles of 16"))
    assert open_device(kind=Granting).capabilities.matrix == MatrixCores(16, 32)
    assert open_device(kind=Granting, matrix_cores="fast").capabilities.matrix == MatrixCores(16, 32, fast=True)
    monkeypatch.setattr(gpu_device, "found_cores", lambda device, index: (None, "wrong results"))
    assert open_device(kind=Granting).capabilities.matrix is None


def test_the_mode_is_the_options_or_the_environments(monkeypatch):
    assert matrix_cores.mode_of() == "auto"
    monkeypatch.setenv(matrix_cores.CHOICE, "off")
    assert matrix_cores.mode_of() == "off" and matrix_cores.mode_of("fast") == "fast"
    monkeypatch.setenv(matrix_cores.CHOICE, "on")
    with pytest.raises(UserError, match="LORAWGPU_MATRIX_CORES='on': want auto, off or fast"):
        matrix_cores.mode_of()
