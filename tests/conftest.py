"""Shared by all tests: the adapter under test. A missing adapter fails the tests that need it, it skips none."""

import os
import tempfile

import pytest
from hypothesis import settings

# On a loaded machine an example may take long, which says nothing of the code. CI tries the same examples each time, so
# that a change is judged by what it changed; elsewhere they are new ones.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Vulkan's loader complains without one


@pytest.fixture(scope="session")
def device():
    from lorawgpu.gpu import open_device  # not at the top: tests of host code must not need wgpu

    judge_wgsl()
    return open_device()


def judge_wgsl():
    """Look at every module that a test compiles."""
    from wgsl_grammar import faults, partial_writes

    from lorawgpu.gpu import kernel

    load = kernel.load

    def judged(stem, template=()):
        code = load(stem, template)
        assert faults(code) == [], f"{stem}: browsers want parentheses"
        assert partial_writes(code) == [], f"{stem}: another thread may write the rest of the vector"
        return code

    kernel.load = judged


@pytest.fixture(scope="session")
def kernels(device):
    from lorawgpu.gpu import KernelCache

    return KernelCache(device)


@pytest.fixture
def plan(device, kernels):
    """An empty plan; compiled kernels are shared by the whole session."""
    from lorawgpu.gpu import Plan

    return Plan(device, kernels)


def pytest_collection_modifyitems(items):
    """Long tests last, so that a quick failure shows within minutes."""
    items.sort(key=lambda item: item.get_closest_marker("long") is not None)


@pytest.fixture
def runs(device, kernels):
    """Starts whole training runs on the session's device (tests/tiny_run.py)."""
    from tiny_run import Runs

    return Runs(device, kernels)


@pytest.fixture
def train_main(monkeypatch, device, kernels):
    """`main` of the train command on the session's device (tests/tiny_run.py)."""
    from tiny_run import shared_main

    return shared_main(monkeypatch, device, kernels)


@pytest.fixture(scope="module")
def llm_folder(tmp_path_factory):
    """A model that talks, as a folder (tests/byte_model.py)."""
    from byte_model import save_byte_model

    return save_byte_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def llm(llm_folder, device, kernels):
    """The same on the session's device, with the golden adapter."""
    from byte_model import load_byte_model

    return load_byte_model(llm_folder, device, kernels)
