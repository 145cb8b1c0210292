"""`lorawgpu doctor`: it passes here, covers every kernel, and names a broken one."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lorawgpu.doctor import __main__ as doctor
from lorawgpu.doctor import kernels as table
from lorawgpu.doctor.check import KernelCheck, Outcome, error_of, run_check
from lorawgpu.doctor.end_to_end import check_decoding, check_training
from lorawgpu.doctor.environment import short_limits
from lorawgpu.doctor.kernels import CHECKS
from lorawgpu.doctor.lab import Fault
from lorawgpu.doctor.system import Card, System, diagnose, inspect_system, install_advice
from lorawgpu.gpu import KernelCache
from lorawgpu.gpu import kernel as gpu_kernel
from lorawgpu.gpu.device import DEFAULT_LIMITS

FEW = [check for check in CHECKS if check.kernel in ("gate", "rmsnorm")]  # next to that of memory
GATES = [check for check in FEW if check.kernel == "gate"]
BENCHMARK_ONLY = {"random_weights"}  # makes weights for benchmarks, whose values do not matter
TRIED_ELSEWHERE = {"matrix_probe", "matrix_up"}  # before a plan is recorded: tests of matrix cores


@pytest.fixture(scope="module")
def whole(device, kernels):
    """Outcomes of all kernel checks on good kernels, which are in the session's cache afterwards."""
    return [run_check(device, kernels, check) for check in CHECKS]


def test_every_kernel_is_right_here(whole):
    assert not [(o.kernel, o.shape, o.error, o.fault) for o in whole if not o.ok]


def test_every_shader_is_in_the_table(whole):
    shaders = {path.name.split(".")[0] for path in gpu_kernel.SHADERS.glob("*.wgsl*")}
    assert shaders - {stem for o in whole for stem in o.ran} == BENCHMARK_ONLY | TRIED_ELSEWHERE


def test_every_entry_point_is_in_the_table(device, whole):
    """For shaders whose entry points are known without rendering."""
    cache = KernelCache(device)
    entries = set()
    for path in gpu_kernel.SHADERS.glob("*.wgsl*"):
        names, stem = re.findall(r"@compute.*\nfn (\w+)", path.read_text()), path.name.split(".")[0]
        if stem not in BENCHMARK_ONLY | TRIED_ELSEWHERE and not stem.startswith(
            ("mat", "row_up", "attention_flash")
        ):  # slow to compile again
            entries |= {f"{stem}.wgsl:{name}" for name in names}
    recorded = set()
    cache.get = lambda stem, entry, *_: recorded.add(f"{stem}.wgsl:{entry}") or KernelCache.get(cache, stem, entry, *_)
    for check in CHECKS:
        if not check.kernel.startswith(("mat", "flash")):
            run_check(device, cache, check)
    recorded |= {
        f"{stem}.wgsl:forward" for stem in ("sum_parts", "attention_stats")
    }  # of flash, seen in the test above
    assert entries <= recorded


# Shader, a line of it, and its replacement: faults that a driver or an edit may cause.
BROKEN = {
    "mean over the padded width": ("rmsnorm", "/ params.C + params.eps", "/ f32(params.ld4 * 4u) + params.eps"),
    "backward without its mean": ("rmsnorm", "- x[base + c] * k", ""),
    "bounds check of the rows missing": ("gate", "if (row >= params.rows) { return; }", ""),
    "rotation in the other direction": ("rope", "roped(t, c, params.Q, 0u)", "roped(t, c, params.Q, 4u)"),
    "padding of a gradient not cleared": ("rope_heads", "dqkv[unit.t * params.ld + c] = Element();", ""),
    "weight decay twice": ("adamw", "- step.lr * params.weight_decay", "- 2.0 * step.lr * params.weight_decay"),
    "sum without a part": ("sum_parts", "var p = 1u", "var p = 2u"),
    "delta of another row": ("attention_stats", "let base = t *", "let base = (t / 2u) *"),
    "a gate without its up": ("gate", "act(g) * u;", "act(g);"),
    "softmax without its target": ("cross_entropy", "columns(c) == vec4(id)", "columns(c) == vec4(id + 1u)"),
    "no WGSL at all": ("gather", "let source = source_row(row);", "let source = ;"),
    "a buffer renamed": ("embedding", "read_write> x:", "read_write> out:"),
    "a draw of another token": ("sample", "return -log(e);", "return log(e);"),
    "a step that is never bad": ("step_state", "atomicAdd(&state[2], 1u);", ""),
}


class Breaking(KernelCache):
    """The good kernels of `kernels`, except one shader, which is compiled from an altered source."""

    def __init__(self, kernels, stem):
        self.device, self._modules = kernels.device, {k: m for k, m in kernels._modules.items() if k[0] != stem}
        self._kernels = {key: kernel for key, kernel in kernels._kernels.items() if key[0] != stem}


def break_shader(monkeypatch, stem, line, altered):
    right = gpu_kernel.load

    def load(name, *args):
        code = right(name, *args)
        assert name != stem or line in code, f"{stem} no longer contains {line!r}: break another line"
        return code.replace(line, altered) if name == stem else code

    monkeypatch.setattr(gpu_kernel, "load", load)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_named(device, kernels, whole, monkeypatch, fault):
    stem = BROKEN[fault][0]
    break_shader(monkeypatch, *BROKEN[fault])
    broken = Breaking(kernels, stem)
    # one size per variant is enough
    firsts = {(check.kernel, check.record, str(check.args[0])): check for check in reversed(CHECKS)}.values()
    wrong = [o for o in (run_check(device, broken, check) for check in firsts) if not o.ok]
    assert wrong and all(stem in o.suspects for o in wrong), [(o.suspects, o.error, o.fault) for o in wrong]


def test_a_broken_kernel_shows_in_a_model_too(device, kernels, monkeypatch):
    break_shader(monkeypatch, *BROKEN["delta of another row"])
    outcomes = [*check_training(device, Breaking(kernels, "attention_stats"), "llama")]
    assert {o.shape for o in outcomes if not o.ok} >= {"grad_rel_max"}
    assert next(o for o in outcomes if o.shape == "loss_abs_err").ok  # the forward is not affected


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_tiny_models_are_right_here(device, kernels, family):
    outcomes = [*check_training(device, kernels, family), check_decoding(device, kernels, family)]
    assert len(outcomes) == 7 and all(o.ok for o in outcomes), outcomes
    # BitNet's tolerance allows a flipped rounding; without one, the error must be far smaller
    assert max(o.error for o in outcomes) < 1e-4


@pytest.fixture
def few(monkeypatch, device, kernels):
    """The command with a few checks on the session's device."""
    monkeypatch.setattr(doctor, "CHECKS", FEW)
    monkeypatch.setattr(doctor, "FAMILIES", [])
    monkeypatch.setattr(doctor, "open_device", lambda choice: device)


def test_the_table_and_the_exit_code(few, capsys):
    assert doctor.main([]) == 0
    out, err = capsys.readouterr()
    assert err == "" and re.search(rf"^{1 + len(FEW)} checks, 0 failed, [\d.]+ s$", out, re.M)
    assert re.search(r"^rmsnorm +3, 123 .* ok$", out, re.M) and "adapter 0: " in out and "workgroup memory" in out


def test_json_for_a_bug_report(few, capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["checks"]) == 1 + len(FEW) and report["seconds"] > 0
    assert report["versions"]["wgpu"] and report["adapters"][0]["limits"]["max-buffer-size"] > 0
    assert {"kernel", "shape", "error", "tolerance", "ok", "fault"} <= report["checks"][1].keys()


def test_a_broken_kernel_ends_in_exit_code_1(few, capsys, monkeypatch):
    break_shader(monkeypatch, *BROKEN["a gate without its up"])
    assert doctor.main([]) == 1
    out, err = capsys.readouterr()
    assert (
        f"{len(GATES)} checks failed" in err
        and ": gate\n" in err
        and "update the driver" in err
        and "Traceback" not in err
    )
    assert re.search(r"^gate .* WRONG in m$", out, re.M)


def test_a_broken_kernel_in_json(few, capsys, monkeypatch):
    break_shader(monkeypatch, *BROKEN["a gate without its up"])
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and [c["kernel"] for c in report["checks"] if not c["ok"]] == len(GATES) * ["gate"]


def test_a_lost_device_ends_the_checks(few, capsys, monkeypatch):
    lost = Outcome("gate", "silu, 3, 123", None, 0.0, fault="the device was lost: Parent device is lost")
    monkeypatch.setattr(doctor, "run_check", lambda *_: lost)
    assert doctor.main([]) == 1
    out, err = capsys.readouterr()
    assert "2 checks, 1 failed" in out and "FAILED: the device was lost" in out and "1 checks failed" in err


def test_no_adapter_is_exit_code_2_with_advice(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "list_adapters", lambda: [])
    monkeypatch.setattr(doctor, "inspect_system", lambda: System("fedora", "Fedora", (Card("AMD", "1002:744c"),)))
    assert doctor.main([]) == 2
    out, err = capsys.readouterr()
    assert "no GPU adapter found" in err and "AMD card (1002:744c)" in err and "dnf install mesa-vulkan-drivers" in err
    assert doctor.main(["--json"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"] == [err.splitlines()[1].strip()]


def test_a_device_that_is_not_there_is_exit_code_2(capsys):
    assert doctor.main(["--device", "Voodoo"]) == 2
    assert "device 'Voodoo'" in capsys.readouterr().err


def adapter(vendor_id=0x10005, kind="CPU"):
    return SimpleNamespace(info={"vendor_id": vendor_id, "adapter_type": kind})


CARD = {"NVIDIA": Card("NVIDIA", "10de:2335"), "AMD": Card("AMD", "1002:744c"), "Intel": Card("Intel", "8086:56a0")}
SYSTEMS = [
    (System("debian", ""), [], "apt-get install mesa-vulkan-drivers"),
    (System("debian", "", (CARD["NVIDIA"],)), [adapter()], "nvidia-vulkan-icd"),
    (System("ubuntu", "", (CARD["NVIDIA"],)), [], "ubuntu-drivers install"),
    (System("ubuntu", "", (CARD["NVIDIA"],), container=True), [adapter()], "NVIDIA_DRIVER_CAPABILITIES=all"),
    (System("fedora", "", (CARD["Intel"],)), [], "dnf install mesa-vulkan-drivers"),
    (System("arch", "", (CARD["AMD"],)), [adapter()], "vulkan-radeon"),
    (System("linux", ""), [], "your distribution's package"),
    (System("macos", ""), [], "Metal"),
    (System("windows", ""), [], "DX12"),
    (System("debian", "", wsl=True), [], "WSL"),
    (System("debian", "", denied=("/dev/dri/renderD128",)), [], "usermod -aG render"),
    (System("debian", ""), [adapter()], "slowly"),
]


@pytest.mark.parametrize(("system", "adapters", "words"), SYSTEMS)
def test_problems_are_named_with_advice(system, adapters, words):
    assert words in "\n".join(diagnose(system, adapters))


def test_no_findings_if_all_is_well():
    cards = (CARD["NVIDIA"], CARD["Intel"])
    assert (
        diagnose(System("debian", "", cards), [adapter(0x10DE, "DiscreteGPU"), adapter(0x8086, "IntegratedGPU")]) == []
    )


def test_the_system_is_read_from_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    bridge = tmp_path / "sys/bus/pci/devices/0000:00:00.0"
    for folder, kind, vendor in ((card, "0x030200", "0x10de"), (bridge, "0x060000", "0x8086")):
        folder.mkdir(parents=True)
        for name, value in (("class", kind), ("vendor", vendor), ("device", "0x2335")):
            (folder / name).write_text(value + "\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('PRETTY_NAME="Mint 21"\nID=linuxmint\nID_LIKE="ubuntu debian"\n')
    (tmp_path / ".dockerenv").write_text("")
    system = inspect_system(tmp_path)
    assert (system.kind, system.cards, system.container) == ("ubuntu", (CARD["NVIDIA"],), True)
    assert system.text.startswith("Mint 21, Linux")
    for file in ("dev/nvidia0", "dev/nvidiactl", "dev/dxg"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    (card / "class").unlink()
    system = inspect_system(tmp_path)  # a container that hides the bus
    assert [str(c) for c in system.cards] == ["NVIDIA card (nvidia0)"] and system.wsl


def test_an_empty_system_is_not_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert inspect_system(tmp_path).kind == "linux"
    assert install_advice(inspect_system(tmp_path), "AMD").startswith("your distribution's package")


def test_limits_that_are_too_low_are_named():
    limits = dict(DEFAULT_LIMITS) | {
        "max-storage-buffers-per-shader-stage": 4,
        "min-uniform-buffer-offset-alignment": 512,
    }
    words = short_limits({"name": "Old card", "limits": limits})
    assert len(words) == 2 and "max-storage-buffers-per-shader-stage is 4, the kernels need 8" in words[0]
    assert "min-uniform-buffer-offset-alignment is 512" in words[1]
    assert not short_limits({"name": "Good card", "limits": dict(DEFAULT_LIMITS) | {"max-buffer-size": 1 << 40}})


def test_errors_are_relative_to_the_largest_value():
    want = np.array([[3.0, -4.0]])
    assert error_of(np.array([[3.0, -4.0, 0, 0]]), want) == 0
    assert error_of(np.array([[3.0, -2.0]]), want) == 0.5
    assert error_of(np.array([[np.nan, -4.0]]), want) == error_of(np.array([[np.inf, -4.0]]), want) == float("inf")
    assert error_of(np.array([0.25]), np.zeros(1)) == 0.25  # wanted 0: the absolute difference
    with pytest.raises(Fault, match="padding"):
        error_of(np.array([[3.0, -4.0, 1e-9]]), want)


def test_a_kernel_that_writes_past_its_end_or_differs_is_caught(device, kernels):
    """A clear that is one row too long, in the doctor's own lab."""

    def too_long(lab):
        out = lab.output(4, 16)
        lab.plan.clear(out.tensor)
        return lambda: {"out": (out.value, np.zeros((4, 16)))}

    outcome = run_check(device, kernels, KernelCheck("clear", too_long, 0.0))
    assert not outcome.ok and "wrote outside its output" in outcome.fault
    assert replace(outcome, fault="", error=float("nan")).ok is False


def test_tolerances_have_room_but_not_much(whole):
    """A tolerance far above the measured error would hide a lost term."""
    loose = {table.EXACT: 1, table.ROUNDED: 1000, table.SUMMED: 1000}
    assert all(o.tolerance <= max(o.error, 3e-8) * loose[o.tolerance] for o in whole)
