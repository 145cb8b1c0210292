"""Facts for a bug report: versions, GPUs with limits and features; and a check of the device's memory."""

import importlib.metadata
import platform
import time

import numpy as np

from lorawgpu import __version__
from lorawgpu.doctor.check import Outcome
from lorawgpu.doctor.system import System, card_memory
from lorawgpu.errors import DeviceError
from lorawgpu.gpu import GPUError
from lorawgpu.gpu.device import DEFAULT_LIMITS

PACKAGES = ("numpy", "wgpu", "tokenizers", "jinja2", "pydantic", "gguf", "huggingface_hub", "pyarrow", "zstandard")
FEATURES = ("timestamp-query", "timestamp-query-inside-passes", "shader-f16", "subgroup", "pipeline-cache")
PROBE = 32 << 20  # bytes written and read back


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and dependencies; None for packages that are not installed."""
    found = {"lorawgpu": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def adapter_facts(adapter) -> dict:
    """The identity of a GPU, and the limits and features that matter here."""
    info = adapter.info
    return {
        "name": info["device"],
        "type": info["adapter_type"],
        "backend": info["backend_type"],
        "driver": info["description"],
        "vendor_id": info["vendor_id"],
        "limits": {name: int(adapter.limits[name]) for name in DEFAULT_LIMITS},
        "features": [name for name in FEATURES if name in adapter.features],
    }


def short_limits(facts: dict) -> list[str]:
    """A message for each limit of a GPU that is too low for the kernels."""
    lower = lambda name, have, need: have > need if name.startswith("min-") else have < need  # noqa: E731
    return [
        f"{facts['name']}: its {name} is {facts['limits'][name]:,}, the kernels need {need:,}: update the driver"
        for name, need in DEFAULT_LIMITS.items()
        if lower(name, facts["limits"][name], need)
    ]


def machine_facts(system: System, adapters: list) -> dict:
    """The part of the report that needs no opened device."""
    return {
        "versions": versions(),
        "system": system.text,
        "cards": [str(card) for card in system.cards],
        "card_memory": card_memory(),
        "adapters": [adapter_facts(adapter) for adapter in adapters],
    }


def check_memory(device) -> Outcome:
    """Write bytes to the device and read them back; the error is the fraction of wrong words."""
    size, began = min(PROBE, device.max_binding), time.perf_counter()
    words = np.random.default_rng(0).integers(0, 1 << 32, size // 4, np.uint32)
    error, fault = None, ""
    try:
        tensor = device.upload(words, label="memory probe", kind="probe")
        error = float((device.read(tensor) != words).mean())
    except (DeviceError, GPUError) as found:
        fault = str(found)
    return Outcome("memory", f"{size >> 20} MiB and back", error, 0.0, "", fault, time.perf_counter() - began)
