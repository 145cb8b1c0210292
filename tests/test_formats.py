"""Record formats: detected by their keys, converted, tokenized, masked; errors name file, line and key."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.formats import FORMATS, Chat, Text, Tokens, check_type, detect_type, to_example
from lorawgpu.errors import UserError

SOURCE = ("data.jsonl", 3)
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}


def example(record):
    return to_example(detect_type(record, SOURCE), record, SOURCE)


def encode(record, kind=None, settings=None, template="chatml", vocab_size=None, **tokenizer):
    tokenizer = tiny_tokenizer(**tokenizer)
    chat = ChatTemplate(BUILT_IN[template], tokenizer.special_tokens)
    settings = settings or EncodeSettings(4096, "truncate", False, ("assistant",))
    kind = kind or detect_type(record, SOURCE)
    return Encoder(kind, settings, tokenizer, chat, vocab_size)(*SOURCE, json.dumps(record).encode())


def trained(sample):
    return tiny_tokenizer().decode(sample.labels[sample.labels != IGNORE])


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (CHAT, "chat"),
        (CHAT | {"prompt": "Hi", "id": 3}, "chat"),
        ({"conversations": []}, "conversations"),
        ({"instruction": "i", "input": "", "output": "o"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"segments": []}, "segments"),
        ({"text": "x"}, "text"),
        ({"input_ids": [1], "labels": [1]}, "pretokenized"),
    ],
)
def test_detected_by_keys(record, kind):
    assert detect_type(record, SOURCE) == kind


def test_ambiguous_and_unknown_keys_are_named():
    with pytest.raises(BadLine, match=r"data.jsonl, line 3: .*several formats \(alpaca, text\).* `type:`"):
        detect_type({"instruction": "", "output": "", "text": ""}, SOURCE)
    for record, question, answer in (
        (("frage", "antwort"), "frage", "antwort"),
        (("question", "antwort"), "question", "antwort"),
        (("question", "answer", "response"), "question", "answer # or response"),
        (("a", "b", "c"), "KEY", "KEY"),
    ):
        lines = f"entry:\n    type: alpaca\n    field_instruction: {question}\n    field_output: {answer}\n"
        with pytest.raises(BadLine, match=rf"line 3: .* these keys: `{record[0]}`, [^$]*{lines}.* chat: messages"):
            detect_type(dict.fromkeys(record, "x"), SOURCE)
    with pytest.raises(BadLine, match="line 3: a record of type chat needs the key `messages`; it has `text`"):
        to_example("chat", {"text": ""}, SOURCE)


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
BRIEF = {"role": "system", "content": "Be brief."}
SPOKEN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"question": "Hi", "answer": "Yes", "id": 1}, [USER, ANSWER]),  # GSM8K
        ({"instruction": "Hi", "response": "Yes", "category": "qa", "context": ""}, [USER, ANSWER]),  # Dolly
        ({"prompt": "Hi", "response": "Yes"}, [USER, ANSWER]),
        ({"system_prompt": "Be brief.", "question": "Hi", "response": "Yes"}, [BRIEF, USER, ANSWER]),  # OpenOrca
        ({"query": "Hi", "response": "Yes", "type": "GSM"}, [USER, ANSWER]),  # MetaMath
        ({"input": "Hi", "output": "Yes"}, [USER, ANSWER]),
        ({"problem": "Hi", "solution": "Yes"}, [USER, ANSWER]),
        ({"conversation": SPOKEN}, [USER, ANSWER]),
        ({"dialogue": [USER, ANSWER], "system": "Be brief."}, [BRIEF, USER, ANSWER]),
        ({"messages": SPOKEN}, [USER, ANSWER]),
    ],
)
def test_other_names_of_fields_give_the_same_chat(record, messages):
    assert example(record) == Chat(messages, [None] * len(messages))


def test_the_context_of_a_question_follows_it_as_an_input_does():
    context = {"instruction": "Sum up.", "context": "Long text", "response": "Yes"}
    assert example(context) == example({"instruction": "Sum up.", "input": "Long text", "output": "Yes"})
    assert example({"question": "Sum up.", "input": "Long text", "answer": "Yes"}) == example(context)


def test_types_of_other_tools_and_typos():
    assert check_type("sharegpt") == "conversations" and check_type("alpaca") == "alpaca"
    assert all(check_type(name) == name for name in FORMATS)
    with pytest.raises(UserError, match="`convers`.*'conversations'"):
        check_type("convers")


def test_conversations_become_messages():
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Yes", "train": False},
        {"from": "observation", "value": "2"},
    ]
    chat = example({"conversations": turns, "system": "Be brief.", "tools": '[{"name": "f"}]'})
    expected = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes"), ("tool", "2")]
    assert chat.messages == [{"role": role, "content": content} for role, content in expected]
    assert chat.train == [None, None, False, None] and chat.tools == [{"name": "f"}]
    assert example({"conversations": CHAT["messages"]}).messages == CHAT["messages"]


def test_alpaca_with_its_own_template_and_another():
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": ""}
    assert example(record).messages[0]["content"] == "Add.\n\n1 2"
    text = tiny_tokenizer().decode(encode(record, template="alpaca").sample.input_ids)
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>")
    assert trained(encode(record, template="alpaca").sample) == "3</s>"
    assert trained(encode(record).sample) == "3<|im_end|>"


def test_prompt_and_completion_are_joined_as_they_are():
    out = encode({"prompt": "Assistant:", "completion": " Yes"}, add_bos=True).sample
    assert tiny_tokenizer().decode(out.input_ids) == "<s>Assistant: Yes</s>"
    assert trained(out) == " Yes</s>"


def test_a_token_across_prompt_and_completion_belongs_to_the_completion():
    assert trained(encode({"prompt": "Assistant: ", "completion": "Yes"}).sample) == " Yes</s>"


def test_prompt_and_completion_as_messages():
    prompt = CHAT["messages"] + [{"role": "user", "content": "And"}]
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "42."}]}
    assert trained(encode(record).sample) == "42.<|im_end|>"
    everything = encode(record, settings=EncodeSettings(4096, "truncate", True, ("assistant",))).sample
    assert (everything.labels == everything.input_ids).all()
    with pytest.raises(BadLine, match="two strings or two lists of messages, got str and list"):
        example({"prompt": "a", "completion": []})


@given(
    st.lists(st.tuples(st.sampled_from(["Yes", " the", "ïv", "😀", "\n", ": "]), st.booleans()), min_size=1, max_size=9)
)
def test_segments_train_exactly_the_labeled_pieces(pieces):
    record = {"segments": [{"text": t, "label": flag} for t, flag in pieces]}
    tokenizer = tiny_tokenizer()
    encoding = tokenizer.encoding("".join(t for t, _ in pieces))
    ids, offsets = encoding.ids, encoding.offsets
    owners = [flag for t, flag in pieces for _ in t]
    expected = [any(owners[a:b]) for a, b in offsets]
    if not any(expected[1:]):
        with pytest.raises(BadLine, match="no target tokens"):
            encode(record)
        return
    out = encode(record).sample
    assert out.input_ids.tolist() == ids  # nothing added
    assert (out.labels != IGNORE).tolist() == expected


def test_text_gets_eos_and_the_tokenizers_bos_once():
    tokenizer = tiny_tokenizer()
    for text in ("Hello", "<s>Hello", "Hello</s>", "<s>Hello</s>"):
        out = encode({"text": text}, add_bos=True).sample
        assert tokenizer.decode(out.input_ids) == "<s>Hello</s>"
        assert trained(out) == ("Hello</s>" if text[0] == "H" else "<s>Hello</s>")
        assert out.targets == len(out) - 1  # BOS comes first: never a target, labeled or not
    assert tokenizer.decode(encode({"text": "Hello"}).sample.input_ids) == "Hello</s>"


def test_pretokenized_needs_no_tokenizer():
    encoder = Encoder("pretokenized", EncodeSettings(8, "truncate", False, ("assistant",)), None, None, vocab_size=10)
    record = {"input_ids": [1, 2, 3, 0], "labels": [-100, 2, -100, -100], "attention_mask": [1, 1, 1, 0]}
    out = encoder("f", 1, json.dumps(record).encode()).sample
    assert out.input_ids.tolist() == [1, 2, 3] and out.labels.tolist() == [-100, 2, -100]
    assert encoder("f", 1, b'{"input_ids": [1, 2]}').sample.labels.tolist() == [1, 2]
    with pytest.raises(UserError, match="type text needs the model's tokenizer"):
        Encoder("text", encoder.settings, None, None)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
    call = {"role": "assistant", "content": [], "tool_calls": [{"function": {"name": "f"}}]}
    chat = example({"messages": [{"role": "user", "content": parts}, call]})
    assert chat.messages[0]["content"] == "ab\n" and "content" not in chat.messages[1]
    spoken = example({"conversations": [{"from": "human", "value": parts}]})
    assert spoken.messages == [{"role": "user", "content": "ab\n"}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` .*differ in length: 2, 1 and 2"),
        ({"input_ids": [1, -2], "labels": [1, 1]}, r"`input_ids\[1\]` must be an integer of at least 0, got -2"),
        ({"input_ids": [1, 2.0], "labels": [1, 1]}, r"`input_ids\[1\]` must be an integer"),
        ({"input_ids": [1, True], "labels": [1, 1]}, r"`input_ids\[1\]` must be an integer"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "`labels` contains -1; .* -100"),
        ({"input_ids": [1, 10], "labels": [1, 1]}, "token id 10 is outside the model's vocabulary of 10"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no target tokens"),
        ({"input_ids": [], "labels": []}, "no target tokens"),
        ({"text": ""}, "`text` is empty"),
        ({"text": 3}, "`text` must be a string, got int: 3"),
        ({"messages": "Hi"}, "`messages` must be a list, got str"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be an object with `role` and `content`"),
        ({"messages": [{"from": "me", "value": "Hi"}]}, r"messages\[0\]: `from` must be one of .* got 'me'"),
        ({"question": "x", "answer": None}, "`answer` must be a string, got nothing"),
        ({"dialogue": ["Hi"]}, r"dialogue\[0\] must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only parts of type text .* 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a string in `text`"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "only parts of type text"),
        ({"messages": [{"role": "user", "content": []}]}, "`content` is an empty list"),
        ({"messages": [{"role": "user", "content": "x", "train": "no"}]}, "`train` must be true or false .* got 'no'"),
        ({"messages": CHAT["messages"], "tools": "{"}, "`tools` is a string that is not valid JSON"),
        ({"conversations": [{"from": "me", "value": "x"}]}, r"conversations\[0\]: `from` must be one of .* got 'me'"),
        ({"segments": [{"label": 1, "text": "x"}]}, r"segments\[0\] must be an object with `label`"),
        ({"instruction": "x", "output": None}, "`output` must be a string, got nothing"),
    ],
)
def test_bad_records_name_file_line_and_key(record, message):
    with pytest.raises(BadLine, match=rf"^data.jsonl, line 3: .*{message}"):
        encode(record, vocab_size=10)


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
KEYS = st.sampled_from(["role", "content", "from", "value", "text", "label", "train"])
NESTED = st.recursive(LEAVES, lambda s: st.lists(s, max_size=3) | st.dictionaries(KEYS, s, max_size=3))


@given(NESTED)
def test_anything_at_all_is_an_example_or_a_bad_line(value):
    for kind, (keys, _) in FORMATS.items():
        record = dict.fromkeys(keys, value)
        try:
            assert isinstance(to_example(kind, record, SOURCE), Chat | Text | Tokens)
        except BadLine as error:
            assert str(error).startswith("data.jsonl, line 3: ")


def test_a_sample_that_is_too_long_is_truncated_dropped_or_rejected():
    record = {"input_ids": list(range(9)), "labels": [-100] * 4 + [4, 5, 6, 7, 8]}

    def encode_at(limit, strategy):
        return encode(record, settings=EncodeSettings(limit, strategy, False, ("assistant",)))

    cut = encode_at(6, "truncate")
    assert cut.truncated and cut.sample.input_ids.tolist() == [0, 1, 2, 3, 4, 5] and cut.sample.targets == 2
    assert encode_at(6, "drop").sample is None
    assert encode_at(4, "truncate").sample is None  # no target token left
    assert not encode_at(9, "raise").truncated
    with pytest.raises(UserError, match="data.jsonl, line 3: 9 tokens, more than sequence_len 8"):
        encode_at(8, "raise")


def test_conversations_without_a_template_say_what_to_do():
    encoder = Encoder("chat", EncodeSettings(64, "drop", False, ("assistant",)), tiny_tokenizer(), None)
    with pytest.raises(UserError, match="no chat template; .* chatml"):
        encoder(*SOURCE, json.dumps(CHAT).encode())
