"""The preview of samples, and the advice about their counts."""

import json
from dataclasses import replace

from test_dataset import loading, tokens, write_lines
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.data.dataset import DatasetSpec, LoadSettings, tokenize
from lorawgpu.data.preview import marked, preview_lines, summary


def test_empty_answers_are_counted_and_reported(tmp_path):
    """From a template that hides tool calls, from data without an answer, and from an empty completion."""
    ask = {"role": "user", "content": "Hi"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for record in ({"messages": [ask, call]}, {"instruction": "Hi", "output": " "}, {"prompt": "Hi", "completion": ""}):
        store = tokenize(write_lines(tmp_path / "a.jsonl", record), loading())
        assert store.counts.empty_targets == 1 and "1 samples an answer" in summary(store.counts)
    good = write_lines(tmp_path / "a.jsonl", {"messages": [ask, {"role": "assistant", "content": "Yes"}]})
    assert tokenize(good, loading()).counts.empty_targets == 0


def test_preview_as_json_is_a_line_a_sample_and_one_of_counts(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": c}]}
        for c in ("Yes", "é", "42.")
    ]
    store = tokenize(write_lines(tmp_path / "a.jsonl", "", *chats), loading())
    lines = [json.loads(line) for line in preview_lines([store], tiny_tokenizer(), 2, as_json=True, color=False)]
    assert [line["line"] for line in lines[:-1]] == [2, 3]
    assert set(lines[0]) == {"line", "input_ids", "labels", "text"}
    assert lines[1]["text"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\né<|im_end|>\n"
    assert lines[1]["input_ids"] == store[1].input_ids.tolist() and lines[1]["labels"] == store[1].labels.tolist()
    assert lines[-1] == store.counts.as_dict() and lines[-1]["samples"] == 3


def test_preview_as_text_marks_what_is_trained(tmp_path):
    spec = write_lines(
        tmp_path / "a.jsonl", {"prompt": "Hello é", "completion": " Yes"}, {"prompt": "a", "completion": "b"}, "{"
    )
    store = tokenize(spec, loading(skip_bad_lines=True))
    lines = list(preview_lines([store], tiny_tokenizer(), 1, as_json=False, color=False))
    assert lines[1] == "Hello é⟦ Yes</s>⟧\n"
    assert lines[2].startswith("2 samples, ") and "line 3: not valid JSON" in lines[3]
    assert marked(store[0], tiny_tokenizer(), color=True) == "Hello é\x1b[30;42m Yes</s>\x1b[0m"
    ids = store[0].input_ids.tolist()
    assert marked(store[0], None, color=False).count(str(ids[-1])) >= 1


def test_preview_without_a_tokenizer_shows_ids(tmp_path):
    store = tokenize(write_lines(tmp_path / "a.jsonl", tokens(5, 6)), LoadSettings(loading().settings, None, None))
    assert list(preview_lines([store], None, 9, as_json=False, color=False))[1] == "5 ⟦6 ⟧\n"
    assert json.loads(next(preview_lines([store], None, 1, as_json=True, color=False)))["text"] is None


def test_a_template_without_an_end_of_turn_token_is_reported(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    store = tokenize(write_lines(tmp_path / "a.jsonl", chat), loading(template=template))
    assert store.counts.missing_eos == 1 and "will not learn to stop" in summary(store.counts)


def test_tokens_across_a_boundary_are_counted_and_reported(tmp_path):
    pairs = ("a ", "Yes"), ("a", " Yes")
    merged, apart = ([{"label": False, "text": a}, {"label": True, "text": b}] for a, b in pairs)
    store = tokenize(write_lines(tmp_path / "a.jsonl", {"segments": merged}, {"segments": apart}), loading())
    assert store.counts.boundary_tokens == 1 and "note: 1 tokens span" in summary(store.counts)
    assert store[0].labels.tolist() == store[1].labels.tolist()  # the token belongs to the trained piece
    pair = {"prompt": "a ", "completion": "Yes"}
    store = tokenize(write_lines(tmp_path / "b.jsonl", pair), loading())
    assert store.counts.boundary_tokens == 1
    everything = replace(loading().settings, train_on_inputs=True)
    store = tokenize(DatasetSpec(str(tmp_path / "b.jsonl")), replace(loading(), settings=everything))
    assert store.counts.boundary_tokens == 0 and "note" not in summary(store.counts)
