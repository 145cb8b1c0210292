"""The adapters of this machine, and the choice of one."""

import os
import tempfile

import wgpu

from lorawgpu.errors import UserError

_RANK = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
INSTALL_HINT = (
    "install a Vulkan driver (Debian/Ubuntu: `apt-get install mesa-vulkan-drivers libvulkan1`, which also brings "
    "a software adapter; NVIDIA: the vendor driver; macOS and Windows need nothing)"
)


def list_adapters() -> list:
    """All adapters that can run compute, best first: discrete, integrated, CPU. OpenGL adapters are left out."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # otherwise Mesa prints a warning per adapter
    found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] in ("Vulkan", "Metal", "D3D12")]
    return sorted(found, key=lambda a: _RANK.get(a.info["adapter_type"], 2))


def choose_adapter(choice: str, adapters: list, local_rank: int = 0):
    """(adapter, reason) for `auto|cpu|gpu|INDEX|NAME`, or several of these with commas. UserError if none matches.

    local_rank: the number of this process among those of its machine, which take turns at the entries and at the
    adapters that match them.
    """
    if not adapters:
        raise UserError(f"no GPU adapter found: {INSTALL_HINT}")
    entries = [choice]
    if "," in choice and not any(choice.lower() in a.info["device"].lower() for a in adapters):
        entries = [entry.strip() for entry in choice.split(",")]
    turn, place = divmod(local_rank, len(entries))
    entry = entries[place]
    found, reason = _matching(entry, adapters)
    turn = turn * entries.count(entry) + entries[:place].count(entry)
    return found[turn % len(found)], reason + (", which other processes use too" if turn >= len(found) else "")


def _matching(choice: str, adapters: list) -> tuple[list, str]:
    """The adapters of one entry, best first, and why. UserError if there is none."""
    names = [
        f"{i}: {a.info['device']} ({a.info['adapter_type']}, {a.info['backend_type']})" for i, a in enumerate(adapters)
    ]
    listing = "\n  ".join(names)
    cpus = [a for a in adapters if a.info["adapter_type"] == "CPU"]
    gpus = [a for a in adapters if a.info["adapter_type"] != "CPU"]
    # With two backends, Windows lists each GPU twice.
    gpus = [a for a in gpus if a.info["backend_type"] == gpus[0].info["backend_type"]]
    if choice == "auto":
        note = f"the best of {len(adapters)}" if gpus else "no GPU found, using the CPU, which is slow"
        return gpus or cpus, f"device auto: {note}"
    if choice in ("cpu", "gpu"):
        if found := cpus if choice == "cpu" else gpus:
            return found, f"device {choice}"
        raise UserError(f"device {choice!r}: no such adapter; found\n  {listing}\n{INSTALL_HINT}")
    if choice.isdecimal() and len(choice) < 10:
        if int(choice) < len(adapters):
            return [adapters[int(choice)]], f"device {choice}"
        raise UserError(f"device {choice!r}: no adapter has that index; found\n  {listing}")
    if found := [a for a in adapters if choice and choice.lower() in a.info["device"].lower()]:
        found = [a for a in found if a.info["backend_type"] == found[0].info["backend_type"]]
        return found, f"device name contains {choice!r}"
    raise UserError(f"device {choice!r}: want auto, cpu, gpu, an index or a part of a name of\n  {listing}")
