"""The notebook runs from its first cell to its last; the first says what a host lacks."""

import json
import os
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "first_run.ipynb"
MESA = "no Vulkan driver; as root, for AMD, Intel, and the CPU: apt-get install -y libvulkan1 mesa-vulkan-drivers"
NVIDIA = "an NVIDIA GPU without its Vulkan driver; as root: apt-get install -y libvulkan1 libnvidia-gl-535"
LOADER = "drivers (lvp) without Vulkan's loader; as root: apt-get install -y libvulkan1"
ICD = "/usr/share/vulkan/icd.d/{}_icd.x86_64.json"


def cells() -> dict[str, str]:
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}


@pytest.mark.parametrize(
    ("system", "drivers", "loader", "nvidia", "words"),
    [
        ("Linux", ["lvp", "radeon"], True, False, "Vulkan drivers: lvp, radeon"),
        ("Linux", [], False, False, MESA),
        (
            "Linux",
            ["lvp"],
            False,
            False,
            "drivers (lvp) without Vulkan's loader; as root: apt-get install -y libvulkan1",
        ),
        ("Linux", [], True, True, NVIDIA),
        ("Linux", ["lvp"], True, True, NVIDIA),
        ("Linux", ["nvidia"], True, True, "Vulkan drivers: nvidia"),
        ("Darwin", [], False, False, "Darwin: no Vulkan driver is needed, it has Metal or DX12"),
    ],
)
def test_the_first_cell_says_what_to_install(monkeypatch, capsys, system, drivers, loader, nvidia, words):
    files = [ICD.format(name) for name in drivers]
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    monkeypatch.delenv("VK_ICD_FILENAMES", raising=False)
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("glob.glob", lambda pattern: files if pattern.startswith("/usr/share") else [])
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libvulkan.so.1" if loader else None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if nvidia else None)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], 0, "535.104.05\n"))
    exec(compile(cells()["driver"], "driver", "exec"), {})
    assert capsys.readouterr().out.strip().startswith(words)


def test_the_notebook_is_saved_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code[0]["id"] == "driver" and all(not c["outputs"] and c["execution_count"] is None for c in code)


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    """In a kernel of its own, a few steps long."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    (tmp_path / "configs").mkdir()
    config = (ROOT / "configs" / "tiny.yaml").read_text("utf-8").replace("sample_prompts:", "sample_prompts: []\n#")
    lines = [line for line in config.splitlines() if not line.startswith("  - What")]
    (tmp_path / "configs" / "tiny.yaml").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 30", "STEPS = 5")
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "here"}
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    (tmp_path / "jupyter" / "kernels" / "python3").mkdir(parents=True)
    (tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json").write_text(
        json.dumps(kernel | {"language": "python"})
    )
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {}
    for cell in notebook.cells:
        texts = [output.get("text") or str(output.get("data")) for output in cell.get("outputs", [])]
        said[cell.id] = SimpleNamespace(text="".join(texts))
    (out,) = (tmp_path / "out").iterdir()
    assert "Vulkan" in said["driver"].text and "step 5" in said["train"].text.replace("/", " ")
    assert "iframe" in said["report"].text and "with the adapter:" in said["ask"].text
    assert "wrote peft" in said["export"].text and (out / "peft" / "adapter_model.safetensors").is_file()
    shutil.rmtree(out)
