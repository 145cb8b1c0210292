"""`lorawgpu.load` and what can be asked of a loaded model, against the golden numbers."""

import subprocess
import sys

import numpy as np
import pytest
from byte_model import CASE, load_byte_model, save_byte_model

import lorawgpu
from lorawgpu import api
from lorawgpu.api import Ended
from lorawgpu.errors import UserError
from lorawgpu.generation.sampling import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def llm(folder, device, kernels):
    return load_byte_model(folder, device, kernels)


def test_load_is_found_without_wgpu():
    script = "import sys, lorawgpu; assert 'wgpu' not in sys.modules; lorawgpu.load; assert 'wgpu' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        lorawgpu.lode  # noqa: B018


def test_load_opens_what_it_is_given(folder, device):
    llm = lorawgpu.load(folder, CASE / "adapter_init", device)
    assert llm.device is device and llm.layout.size == llm.buffers.params.size
    with pytest.raises(UserError, match="no such file or folder"):
        lorawgpu.load(folder / "missing.gguf", device=device)


def test_logits_and_loss_are_the_golden_ones(llm):
    arrays, expected = np.load(CASE / "batch.npz"), np.load(CASE / "expected.npz")
    records = []
    for row, (ids, labels, mask) in enumerate(
        zip(arrays["input_ids"], arrays["labels"], arrays["attention_mask"].astype(bool), strict=True)
    ):
        got, want = llm.logits(ids[mask]), expected["logits"][row][mask]
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-4  # the golden cases' tolerance
        records.append({"input_ids": ids[mask].tolist(), "labels": labels[mask].tolist()})
    assert abs(llm.loss(records) - float(expected["loss"])) < 1e-4


def test_loss_of_text_and_of_conversations(llm):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert np.isfinite(llm.loss(["some text", {"messages": turns}]))
    with pytest.raises(UserError, match="records, line 2"):
        llm.loss(["fine", {"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(UserError, match="got no record"):
        llm.loss([])


def test_a_list_is_answered_as_its_prompts_are(llm, monkeypatch):
    monkeypatch.setattr(api, "MAX_ROWS", 2)
    sampling = Sampling(temperature=1.0, seed=2)
    prompts = [f"number {i}" * (1 + i % 3) for i in range(3)]  # more than are decoded at once
    several = llm.generate(prompts, max_new_tokens=6, sampling=sampling)
    assert len(several) == 3 and len(set(several)) > 1
    assert several[0] == llm.generate(prompts[0], max_new_tokens=6, sampling=sampling)
    assert llm.generate([{"role": "user", "content": prompts[0]}], max_new_tokens=6, sampling=sampling) == several[0]
    assert several == llm.generate(prompts, max_new_tokens=6, sampling=sampling)


def test_the_adapter_changes_the_answer(llm):
    with_adapter = llm.generate("hello", max_new_tokens=12, raw=True)
    assert with_adapter != llm.generate("hello", max_new_tokens=12, raw=True, use_adapter=False)
    assert with_adapter == "".join(llm.stream("hello", max_new_tokens=12, raw=True))


def test_the_context_is_the_models(llm):
    ended = Ended()
    list(llm.stream("x" * 150, raw=True, ended=ended))
    assert ended.reason == "context"
    with pytest.raises(UserError, match="prompt has 161 tokens, the model's context is 160"):
        llm.generate("x" * 161, raw=True)
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.generate("", raw=True)
    with pytest.raises(UserError, match="top_p is 2"):
        llm.generate("x", sampling=Sampling(top_p=2))
