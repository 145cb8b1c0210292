"""Wheel, sdist and image: each command of the workflow and of the Dockerfile is a script that is run here."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SETUP = ("pyproject.toml", "scripts/setup.sh")
RUN_HERE = {"scripts/build_dist.sh", "scripts/check_dist.sh", "scripts/install_image.sh"}
pytestmark = pytest.mark.skipif(os.name == "nt", reason="scripts of bash")


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def environment(folder: Path, extras: str, python: str) -> str:
    """A stand-in for an environment in which these extras are installed."""
    executable(folder / "bin" / "python", python)
    shutil.copy(ROOT / "pyproject.toml", folder / f"installed-{extras}.toml")
    return str(folder)


def tracked(*folders) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def test_the_workflow_and_the_dockerfile_run_these_scripts_alone():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "dist.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands += re.findall(r"^RUN (.*)$", dockerfile, re.M)
    scripts = [re.fullmatch(r"bash (?:/opt/lorawgpu/)?(scripts/\w+\.sh)( \S+)?", command)[1] for command in commands]
    assert set(scripts) == RUN_HERE
    assert 'ENTRYPOINT ["lorawgpu"]' in dockerfile and "COPY . /opt/lorawgpu\n" in dockerfile
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {name.split("/")[0] for name in tracked("lorawgpu", "scripts", "configs")} & set(left_out)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    venv = environment(out / "venv", "dist", f'exec {sys.executable} "$@"')
    command = ["bash", str(ROOT / "scripts" / "build_dist.sh"), str(out / "files")]
    done = subprocess.run(command, env=os.environ | {"VENV": venv}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    return {path.suffix: path for path in (out / "files").iterdir()}


@pytest.mark.long
def test_the_wheel_has_the_package_and_nothing_else(dist):
    with zipfile.ZipFile(dist[".whl"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = message_from_string(wheel.read(info).decode())
        licenses = {Path(name).name for name in wheel.namelist() if "/licenses/" in name}
    assert names == tracked("lorawgpu")
    assert licenses == {"LICENSE", "NOTICE", "LICENSE-PSF.txt"} and metadata["License-Expression"] == "Apache-2.0"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    assert metadata["Requires-Python"] == ">=3.11" and metadata.get_payload().startswith("# lorawgpu")


@pytest.mark.long
def test_the_sdist_has_what_an_installation_needs(dist):
    with tarfile.open(dist[".gz"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert tracked("lorawgpu", "scripts", "configs", "docs", "README.md", "NOTICE") <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", ".ci", ".github"))]


@pytest.mark.long
@pytest.mark.parametrize("kind", [".whl", ".gz"])
def test_what_is_built_plans_a_run_far_from_the_checkout(dist, kind, tmp_path):
    """Its dependencies are those of this environment, so that only the package is installed."""
    more = {"PYTHON": sys.executable, "PIP_NO_DEPS": "1", "PYTHONPATH": sysconfig.get_path("purelib")}
    more["PIP_NO_BUILD_ISOLATION"] = "off"  # which is how pip wants it said that there is none
    command = ["bash", str(ROOT / "scripts" / "check_dist.sh"), str(dist[kind])]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^lorawgpu [\d.]+$", done.stdout, re.M) and "on the device: activations" in done.stdout


@pytest.mark.parametrize("works", [True, False])
def test_the_image_gets_a_driver_and_the_command(tmp_path, works):
    for name in (*SETUP, "scripts/install_image.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    fakes, calls = tmp_path / "fakes", tmp_path / "calls"
    executable(fakes / "apt-get", f'echo "$*" >> {calls}')
    executable(fakes / "id", "echo 0")
    venv = environment(tmp_path / "venv", "hub,parquet,report,zstd", f"exit {0 if works else 1}")
    env = os.environ | {"PATH": f"{fakes}:{os.environ['PATH']}", "VENV": venv, "BIN": str(fakes)}
    command = ["bash", "scripts/install_image.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert re.search("install .*libvulkan1 mesa-vulkan-drivers", calls.read_text())
    if works:
        assert done.returncode == 0, done.stderr
        assert os.readlink(fakes / "lorawgpu") == f"{venv}/bin/lorawgpu"
    else:
        assert done.returncode == 1 and "error: no Vulkan adapter" in done.stderr
