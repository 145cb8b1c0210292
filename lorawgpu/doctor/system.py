"""The system and its GPUs as seen without a GPU driver, and why a driver may not see them."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
LINUX_KINDS = ("ubuntu", "debian", "fedora", "arch")  # the most specific first: Ubuntu identifies as like Debian
MESA = {
    "debian": "apt-get install mesa-vulkan-drivers libvulkan1",
    "ubuntu": "apt-get install mesa-vulkan-drivers libvulkan1",
    "fedora": "dnf install mesa-vulkan-drivers vulkan-loader",
    "arch": "pacman -S vulkan-icd-loader vulkan-radeon vulkan-intel vulkan-swrast",
    "linux": "your distribution's packages of Mesa's Vulkan drivers and the Vulkan loader",
}
NVIDIA = {
    "debian": "apt-get install nvidia-driver nvidia-vulkan-icd (from the non-free section)",
    "ubuntu": "ubuntu-drivers install",
    "fedora": "dnf install akmod-nvidia (from RPM Fusion)",
    "arch": "pacman -S nvidia nvidia-utils vulkan-icd-loader",
    "linux": "your distribution's package of the NVIDIA driver with Vulkan",
}


@dataclass(frozen=True)
class Card:
    """A GPU on the PCI bus, with or without a driver."""

    vendor: str  # of VENDORS
    pci: str  # "10de:2335"

    def __str__(self) -> str:
        return f"{self.vendor} card ({self.pci})"


@dataclass(frozen=True)
class System:
    """`kind`: one of LINUX_KINDS, "linux", "macos" or "windows". `denied`: GPU device files without permission."""

    kind: str
    text: str
    cards: tuple = ()
    container: bool = False
    wsl: bool = False
    denied: tuple = ()


def inspect_system(root: Path = Path("/")) -> System:
    """The system that we run on; tests pass another `root` for /etc, /sys and /dev."""
    kind = {"Darwin": "macos", "Windows": "windows"}.get(platform.system(), "linux")
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if kind != "linux":
        return System(kind, text)
    release = _os_release(root / "etc/os-release")
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    kind = next((kind for kind in LINUX_KINDS if kind in names), "linux")
    container = any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))
    nodes = [*root.glob("dev/dri/renderD*"), *root.glob("dev/nvidia[0-9]*")]
    denied = tuple(str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK))
    name = release.get("PRETTY_NAME", "Linux")
    return System(kind, f"{name}, {text}", _cards(root), container, (root / "dev/dxg").exists(), denied)


def _os_release(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key: value.strip("\"'") for key, _, value in pairs}


def _cards(root: Path) -> tuple:
    """PCI display controllers of known vendors, and NVIDIA GPUs that have device files."""
    cards = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            kind, vendor, device = (int((folder / name).read_text(), 16) for name in ("class", "vendor", "device"))
        except (OSError, ValueError):
            continue
        if kind >> 16 == 3 and vendor in VENDORS:
            cards.append(Card(VENDORS[vendor], f"{vendor:04x}:{device:04x}"))
    nodes = list(root.glob("dev/nvidia[0-9]*"))
    if nodes and not any(card.vendor == "NVIDIA" for card in cards):  # a container may hide the bus
        cards += [Card("NVIDIA", node.name) for node in nodes]
    return tuple(cards)


def install_advice(system: System, vendor: str | None = None) -> str:
    """What to install on this system for a GPU of `vendor`, or for a software adapter."""
    if system.kind == "macos":
        return "macOS includes Metal: update macOS; a virtual machine needs a paravirtualized GPU"
    if system.kind == "windows":
        return f"install the current driver from {vendor or 'the GPU vendor'}'s website; DX12 needs Windows 10 or newer"
    if system.wsl:
        return "WSL has no GPU for Vulkan: run on Windows itself, or use `--device cpu`"
    if vendor == "NVIDIA" and system.container:
        return "start the container with NVIDIA_DRIVER_CAPABILITIES=all, which includes the driver's Vulkan libraries"
    return (NVIDIA if vendor == "NVIDIA" else MESA)[system.kind]


def diagnose(system: System, adapters: list) -> list[str]:
    """Problems with the drivers, each with what to do. `adapters`: from gpu.device.list_adapters."""
    seen = {VENDORS.get(a.info["vendor_id"]) for a in adapters}
    findings = []
    if system.denied:
        findings.append(
            f"{', '.join(system.denied)}: no permission to open it; "
            "join its group (`usermod -aG render,video $USER`, then log in again)"
        )
    for vendor in dict.fromkeys(card.vendor for card in system.cards):
        if vendor not in seen:
            card = next(card for card in system.cards if card.vendor == vendor)
            findings.append(f"no driver for this machine's {card}: {install_advice(system, vendor)}")
    if not adapters and not findings:
        findings.append(f"no GPU and no software adapter: {install_advice(system)}")
    if adapters and all(a.info["adapter_type"] == "CPU" for a in adapters) and not system.cards:
        findings.append("no GPU found: the software adapter gives correct results, but slowly")
    return findings


def card_memory() -> list[str]:
    """The memory of each GPU as its driver reports it: "NVIDIA H200: 143771 MiB, 143155 MiB free"."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    found = []
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        found += ["{}: {}, {} free".format(*line.split(", ")) for line in lines]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    for total in sorted(Path("/sys/class/drm").glob("card*/device/mem_info_vram_total")):
        try:
            mib, used = (int((total.parent / f"mem_info_vram_{kind}").read_text()) >> 20 for kind in ("total", "used"))
        except (OSError, ValueError):
            continue
        found.append(f"{total.parts[4]}: {mib} MiB, {mib - used} MiB free")
    return found


def free_memory() -> int | None:
    """Bytes that are free on the GPU with the most, as its driver reports it; None if no driver does."""
    found = [int(match[1]) << 20 for text in card_memory() if (match := re.search(r"(\d+) MiB free", text))]
    return max(found, default=None)
