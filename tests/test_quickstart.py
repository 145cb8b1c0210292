"""`scripts/quickstart.sh`: its branches with stand-ins for the commands it calls, and once for real."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAKE_PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "$CALLS"
case "$*" in
    *list_adapters*) [ -e "$ADAPTER" ] ;;
    *lorawgpu.train*) mkdir -p "$(echo "$*" | sed 's/.*output_dir=//')" ;;
esac
"""
FAKES = {
    "apt-get": 'echo "apt-get $*" >> "$CALLS"\ncase "$*" in *mesa*) [ -z "$APT_FAILS" ] && touch "$ADAPTER" ;; esac',
    "sudo": 'echo "sudo" >> "$CALLS"; exec "$@"',
    "id": 'echo "$FAKE_UID"',
}  # fmt: skip


class Place:
    """A copy of the files that the script reads, with stand-ins first on the PATH."""

    def __init__(self, folder: Path):
        self.root, fakes = folder / "project", folder / "bin"
        self.calls, self.adapter = folder / "calls", folder / "adapter"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("scripts/quickstart.sh", "scripts/setup.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        fakes.mkdir()
        for path, text in [(python, FAKE_PYTHON)] + [
            (fakes / n, f"#!/usr/bin/env bash\n{t}\n") for n, t in FAKES.items()
        ]:
            path.write_text(text)
            path.chmod(0o755)
        self.env = {"PATH": f"{fakes}:{os.environ['PATH']}", "HOME": str(folder), "CALLS": str(self.calls),
                    "ADAPTER": str(self.adapter), "XDG_RUNTIME_DIR": str(folder), "FAKE_UID": "1000",
                    "APT_FAILS": ""}  # fmt: skip

    def run(self, *args, **env):
        """(exit code, output, calls of stand-ins)."""
        self.calls.write_text("")
        done = subprocess.run(["bash", "scripts/quickstart.sh", *args], cwd=self.root, env=self.env | env, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60)  # fmt: skip
        return done.returncode, done.stdout + done.stderr, self.calls.read_text()


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_it_installs_trains_generates_and_prints_the_next_steps(place):
    place.adapter.touch()
    code, output, calls = place.run()
    assert code == 0, output
    order = ["pip install", "list_adapters", "lorawgpu.train configs/tiny.yaml", "lorawgpu.generate"]
    assert [calls.index(word) for word in order] == sorted(calls.index(word) for word in order)
    assert "--adapter out/tiny --compare" in calls and "apt-get" not in calls
    assert "out/tiny/report.html" in output and "lorawgpu doctor" in output


def test_a_second_time_nothing_is_installed_and_the_first_run_stays(place):
    place.adapter.touch()
    place.run()
    code, output, calls = place.run()
    assert code == 0 and "pip" not in calls
    assert "output_dir=out/tiny-2" in calls and "out/tiny-2/report.html" in output
    (place.root / "pyproject.toml").write_text("changed")
    assert "pip install" in place.run()[2]


@pytest.mark.parametrize("uid, args, sudo", [("0", (), False), ("0", ("--yes",), False), ("1000", ("--yes",), True)])
def test_without_a_gpu_root_and_yes_install_a_software_adapter(place, uid, args, sudo):
    code, output, calls = place.run(*args, FAKE_UID=uid)
    assert code == 0, output
    assert re.search("apt-get install .*libvulkan1 mesa-vulkan-drivers", calls) and ("sudo" in calls) == sudo


def test_without_a_gpu_and_without_yes_it_says_what_to_install(place):
    code, output, calls = place.run()
    assert code == 2 and "sudo apt-get install libvulkan1 mesa-vulkan-drivers" in output
    assert "apt-get" not in calls and "lorawgpu.train" not in calls


def test_a_failing_installation_gives_no_traceback(place):
    code, output, calls = place.run("--yes", APT_FAILS="1")
    assert code == 2 and "error: no Vulkan" in output and "lorawgpu.train" not in calls


def test_an_unknown_option_is_refused(place):
    code, output, calls = place.run("--nope")
    assert code == 2 and "--nope" in output and not calls


@pytest.mark.long
def test_for_real_from_nothing(tmp_path):
    """A copy of the tree, an empty home, no environment: as a new user runs it. Needs network for pip."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    (tmp_path / "home").mkdir()
    keep = {
        k: v for k, v in os.environ.items() if k in ("PATH", "LANG") or "PROXY" in k.upper() or k.startswith("PIP_")
    }
    begin = time.monotonic()
    done = subprocess.run(["bash", "scripts/quickstart.sh", "--yes"], cwd=tmp_path / "clone", text=True, timeout=1500,
                          env=keep | {"HOME": str(tmp_path / "home")}, capture_output=True)  # fmt: skip
    print(done.stdout, done.stderr, f"{time.monotonic() - begin:.0f} s")
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"before: held-out loss ([\d.]+).*held-out loss ([\d.]+)", done.stderr, re.S).groups()
    assert float(after) < 0.8 * float(before)
    without, with_adapter = re.search(
        r"--- without the adapter ---\n(.*)--- with the adapter ---\n(.*?)\n", done.stdout, re.S
    ).groups()
    assert with_adapter.startswith("Use ") and not without.startswith("Use ")
    assert (tmp_path / "clone" / "out" / "tiny" / "report.html").stat().st_size > 50_000
