"""`lorawgpu.load` and the methods of a loaded model, against the golden numbers."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from byte_model import CASE

import lorawgpu
from lorawgpu import Sampling, UserError
from lorawgpu.api import model as api
from lorawgpu.api.model import Ended
from lorawgpu.generate import answer


def test_load_is_found_without_wgpu():
    script = "import sys, lorawgpu; assert 'wgpu' not in sys.modules; lorawgpu.load; assert 'wgpu' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        lorawgpu.lode  # noqa: B018


def test_load_opens_what_it_is_given(llm_folder, device):
    llm = lorawgpu.load(llm_folder, CASE / "adapter_init", device)
    assert llm.device is device and llm.layout.size == llm.buffers.params.size
    with pytest.raises(UserError, match="no such file or folder"):
        lorawgpu.load(llm_folder / "missing.gguf", device=device)


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


def test_a_list_is_answered_like_its_prompts(llm, monkeypatch):
    monkeypatch.setattr(answer, "MAX_ROWS", 2)
    sampling = Sampling(temperature=1.0, seed=2)
    prompts = [f"number {i}" * (1 + i % 3) for i in range(3)]  # more than one batch
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


def test_settings_are_given_by_name_or_together(llm):
    together = Sampling(temperature=3.0, top_k=40, seed=3)
    more = {"max_new_tokens": 8}
    text = llm.generate("a", temperature=3.0, top_k=40, seed=3, **more)
    assert text == llm.generate("a", sampling=together, **more) == "".join(llm.stream("a", sampling=together, **more))
    assert text == llm.generate("a", sampling=replace(together, seed=4), seed=np.int64(3), **more)
    assert text != llm.generate("a", sampling=replace(together, seed=4), **more)
    assert all(callable(getattr(lorawgpu, name)) for name in lorawgpu.__all__)


TURN = {"role": "user", "content": "hi"}
WRONG = [
    ("generate", ("a",), {"max_new_tokens": -5}, "max_new_tokens is -5; wanted a whole number of at least 1"),
    ("generate", ("a",), {"max_new_tokens": 1.5}, "max_new_tokens is 1.5; wanted a whole number"),
    ("generate", ("a",), {"max_new_tokens": 0}, "max_new_tokens is 0; wanted a whole number"),
    ("generate", ("a",), {"max_new_tokens": True}, "max_new_tokens is True; wanted a whole number"),
    ("generate", ("a",), {"temprature": 1}, "unknown setting 'temprature'; the nearest one is 'temperature'"),
    ("generate", ("a",), {"beams": 4}, "unknown setting 'beams'; wanted one of temperature, top_k"),
    ("generate", ("a",), {"temperature": "hot"}, "temperature is 'hot'; wanted a number"),
    ("generate", ("a",), {"temperature": float("nan")}, "temperature is nan; wanted a value from"),
    ("generate", ("a",), {"top_k": 1.5}, "top_k is 1.5; wanted a whole number"),
    ("generate", ("a",), {"seed": None}, "seed is None; wanted a whole number"),
    ("generate", ([],), {}, "prompts is empty; wanted at least one prompt"),
    ("generate", ("a",), {"sampling": 0.7}, "sampling is 0.7; wanted a lorawgpu.Sampling"),
    ("generate", (7,), {}, "the prompt is 7; wanted a string, a list of messages"),
    ("generate", (["a", None],), {}, "the prompt is None; wanted a string"),
    ("generate", ([TURN, "b"],), {}, "prompt, line 1: messages["),
    ("generate", (["a", [TURN | {"role": "usr"}]],), {}, "prompt, line 2: messages["),
    ("generate", ([{"content": "hi"}],), {}, "`role` must be one of"),
    ("generate", ([{"role": "user"}],), {}, "`content` must be a string, got nothing"),
    ("generate", ([TURN],), {"raw": True}, "raw=True continues plain text"),
    ("stream", ([TURN | {"role": "usr"}],), {}, "`role` must be one of"),
    ("stream", ("a",), {"context": 0}, "context is 0; wanted a whole number"),
    ("stream", ("a",), {"max_new_tokens": "9"}, "max_new_tokens is '9'; wanted a whole number"),
    ("logits", ([99999],), {}, "ids contains 99999, which is outside the model's vocabulary of"),
    ("logits", ([1, -1],), {}, "ids contains -1, which is outside"),
    ("logits", ([2**40],), {}, "ids contains 1099511627776, which is outside"),
    ("logits", ([1] * 161,), {}, "ids has 161 tokens, the model's context is 160"),
    ("logits", ([],), {}, "ids is []; wanted a list of token ids"),
    ("logits", ([[1, 2]],), {}, "ids is [[1, 2]]; wanted a list of token ids"),
    ("logits", ([[1], [1, 2]],), {}, "wanted a list of token ids"),
    ("logits", ([1.0],), {}, "ids is [1.0]; wanted a list of token ids"),
    ("logits", ("abc",), {}, "ids is 'abc'; wanted a list of token ids"),
    ("loss", ("abc",), {}, "records is 'abc'; wanted a list of strings"),
    ("loss", ({"text": "a"},), {}, "records is {'text': 'a'}; wanted a list of strings"),
    ("loss", (3,), {}, "records is 3; wanted a list of strings"),
    ("loss", ([3],), {}, "records, line 1: wanted a string or a record of a data set, got 3"),
    ("loss", ([],), {}, "records is empty; wanted at least one"),
    ("loss", (["a", "x" * 161],), {}, "records, line 2: 162 tokens, the model's context is 160: shorten it"),
    ("loss", ([{"input_ids": [1, 99999]}],), {}, "token id 99999 is outside the model's vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize("name, args, kwargs, message", WRONG)
def test_bad_arguments_are_one_clear_message(llm, name, args, kwargs, message):
    with pytest.raises(UserError) as refused:
        answer = getattr(llm, name)(*args, **kwargs)
        list(answer)  # a stream begins when it is read
    assert message in str(refused.value)


def test_a_device_may_be_a_number(llm_folder, monkeypatch):
    choices = []
    monkeypatch.setattr(api, "open_device", lambda choice: choices.append(choice))
    monkeypatch.setattr(api, "LoadedModel", lambda *_: None)
    for device in (0, 1, "auto", None):
        lorawgpu.load(llm_folder, device=device)
    assert choices == ["0", "1", "auto", None]
