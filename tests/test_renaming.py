"""Data sets with other keys than ours give the same tokens as a copy of the data that was renamed by hand."""

import json

import pytest
import yaml
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.config.load import load_config
from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.batching import IGNORE
from lorawgpu.errors import UserError
from lorawgpu.train.setup import TextSetup, load_data

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Yes, the answer is 42."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "General café."},
]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
            for m in TALK]  # fmt: skip
BOTS = [{"who": {"user": "customer", "assistant": "clerk"}.get(m["role"], "system"), "said": m["content"],
         "learn": i == 2} for i, m in enumerate(TALK)]  # fmt: skip


@pytest.fixture
def samples(tmp_path, monkeypatch):
    """samples(record, **keys of the data set): the ids and labels of its one sample."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def read(record, template="chatml", **keys):
        (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
        config = {"base_model": "model", "datasets": [{"path": "d.jsonl", **keys}], "dataset_num_proc": 1}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config | {"dataset_prepared_path": str(tmp_path / "cache")}))
        tokenizer = tiny_tokenizer()
        text = TextSetup(tokenizer, "", ChatTemplate(BUILT_IN[template], tokenizer.special_tokens), None)
        (sample,) = list(load_data(load_config("c.yaml"), text).stores[0])
        return sample.input_ids.tolist(), sample.labels.tolist()

    return read


def flagged(index):
    return [m | {"train": i == index} for i, m in enumerate(TALK)]


@pytest.mark.parametrize(
    ("record", "keys", "by_hand"),
    [
        ({"talk": TALK}, {"type": "chat_template", "field_messages": "talk"}, {"messages": TALK}),
        ({"talk": TALK}, {"field_messages": "talk"}, {"messages": TALK}),
        ({"talk": SHAREGPT}, {"type": "chat_template", "field_messages": "talk"}, {"messages": TALK}),
        (
            {"conversations": SHAREGPT},
            {
                "type": "chat_template",
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
            {"messages": TALK},
        ),
        (
            {"conversations": SHAREGPT},
            {
                "type": "chat_template.default",
                "field_messages": "conversations",
                "message_field_role": "from",
                "message_field_content": "value",
            },
            {"messages": TALK},
        ),
        (
            {"turns": BOTS},
            {
                "type": "chat_template",
                "field_messages": "turns",
                "message_property_mappings": {"role": "who", "content": "said"},
                "roles": {"user": ["customer"], "assistant": ["clerk"]},
                "message_field_training": "learn",
            },
            {"messages": flagged(2)},
        ),
        ({"messages": TALK}, {"type": "chat_template", "drop_system_message": True}, {"messages": TALK[1:]}),
        (
            {"question": "a", "answer": "b"},
            {"type": {"field_instruction": "question", "field_output": "answer"}},
            {"instruction": "a", "output": "b"},
        ),
        (
            {"q": "a", "more": "c", "a": "b", "rule": "d"},
            {"field_instruction": "q", "field_output": "a", "field_input": "more", "field_system": "rule"},
            {"instruction": "a", "input": "c", "output": "b", "system": "d"},
        ),
        ({"question": "a", "answer": "b"}, {"type": "alpaca_chat.load_qa"}, {"instruction": "a", "output": "b"}),
        (
            {"system_prompt": "s", "question": "a", "response": "b"},
            {"type": "alpaca_w_system.load_open_orca"},
            {"system": "s", "instruction": "a", "output": "b"},
        ),
        ({"instruction": "a", "response": "b"}, {"type": "gpteacher"}, {"instruction": "a", "output": "b"}),
        ({"chapter": "Hello there"}, {"type": "completion", "field": "chapter"}, {"text": "Hello there"}),
        ({"chapter": "Hello there", "text": "x"}, {"field": "chapter"}, {"text": "Hello there"}),
        (
            {"messages": [TALK[1], {"role": "assistant", "content": "<think>hm</think>\n\nYes"}]},
            {"type": "chat_template", "split_thinking": True},
            {"messages": [TALK[1], {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}]},
        ),
    ],
)
def test_the_tokens_are_those_of_a_copy_renamed_by_hand(samples, record, keys, by_hand):
    assert samples(record, **keys) == samples(by_hand)


WRITTEN = {"format": "[INST] {instruction} / {input} [/INST] ", "no_input_format": "[INST] {{{instruction}}} [/INST] "}


@pytest.mark.parametrize(
    ("record", "keys", "prompt"),
    [
        ({"instruction": "a", "input": "c"}, WRITTEN, "[INST] a / c [/INST] "),
        ({"instruction": "a", "input": ""}, WRITTEN, "[INST] {a} [/INST] "),
        ({"instruction": "a{input}"}, WRITTEN, "[INST] {a{input}} [/INST] "),
        ({"instruction": "a"}, {"format": "Q: {instruction}\nA: "}, "Q: a\nA: "),
        (
            {"q": "a", "rule": "Be kind."},
            WRITTEN | {"field_instruction": "q", "field_system": "rule", "system_format": "<<{system}>> "},
            "<<Be kind.>> [INST] {a} [/INST] ",
        ),
        ({"instruction": "a"}, WRITTEN | {"system_prompt": "Be kind. "}, "Be kind. [INST] {a} [/INST] "),
        ({"instruction": "a", "system": "No. "}, WRITTEN | {"system_prompt": "Yes. "}, "No. [INST] {a} [/INST] "),
    ],
)
def test_a_format_of_prompts_gives_the_tokens_of_prompts_written_by_hand(samples, record, keys, prompt):
    """As axolotl's user-defined type, whose keys stand under `type`, and also next to it here."""
    want = samples({"prompt": prompt, "completion": "b"})
    assert samples(record | {"output": "b"}, **keys) == want == samples(record | {"output": "b"}, type=keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"format": "{instruction} {inputs}"}, "format: has the field {inputs}; wanted {instruction} and {input}"),
        ({"format": "{instruction.__class__}"}, "has the field {instruction.__class__}"),
        ({"format": "{instruction:>99999999}"}, "has the field {instruction:>99999999}"),
        ({"format": "{instruction!r}"}, "has the field {instruction!r}"),
        ({"format": "{instruction"}, "format: expected '}' before end of string; wanted text with {instruction} and"),
        ({"format": "{instruction}", "no_input_format": "{input}"}, "no_input_format: has the field {input}; wanted {"),
        ({"no_input_format": "{instruction}"}, "no_input_format: only next to `format`"),
        (
            {"format": "{instruction}", "type": "chat"},
            "format: writes the prompts of a question and its answer; remove",
        ),
    ],
)
def test_a_format_that_cannot_be_filled_is_refused_before_any_data_are_read(samples, keys, words):
    with pytest.raises(UserError) as error:
        samples({"instruction": "a", "output": "b"}, **keys)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"question": "a", "output": "b"},
            "line 1: a record with `format` needs the key `instruction`; it has `question`",
        ),
        ({"instruction": "a", "output": 3}, "line 1: `output` must be a string, got int: 3"),
    ],
)
def test_a_record_that_does_not_fit_a_format_is_named(samples, record, words):
    with pytest.raises(UserError) as error:
        samples(record, format="{instruction}")
    assert words in str(error.value)


def test_several_configurations_are_as_many_data_sets(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "d" / name).mkdir(parents=True)
        record = {"input_ids": [1, 2, ord(name[0]) - 100]}
        (tmp_path / "d" / name / "train.jsonl").write_text(json.dumps(record))
    model = {"base_model": "-", "dataset_prepared_path": str(tmp_path / "cache"), "dataset_num_proc": 1}
    config = TrainConfig(**model, datasets=[{"path": str(tmp_path / "d"), "name": ["two", "one"]}])
    data = load_data(config, TextSetup(None, "", None, 20))
    assert [[s.input_ids.tolist() for s in store] for store in data.stores] == [[[1, 2, 16]], [[1, 2, 11]]]


def test_a_loader_of_datasets_as_path_takes_the_file_of_data_files(samples):
    record = {"messages": TALK}
    for files in ("d.jsonl", ["d.jsonl"]):
        assert samples(record, path="json", data_files=files, ds_type="json", split="train") == samples(record)


def trained(samples, **keys):
    ids, labels = samples({"messages": TALK}, **keys)
    return tiny_tokenizer().decode([i for i, label in zip(ids, labels, strict=True) if label != IGNORE])


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("turn", "Yes, the answer is 42.<|im_end|>General café.<|im_end|>"),
        ("none", "Yes, the answer is 42.General café."),
        ("last", "Yes, the answer is 42.General café.<|im_end|>"),
        ("all", "<|im_end|><|im_end|>Yes, the answer is 42.<|im_end|><|im_end|>General café.<|im_end|>"),
    ],
)
def test_which_ends_of_turns_carry_loss(samples, where, text):
    assert trained(samples, train_on_eos=where) == text
    assert trained(samples, train_on_eot=where) == text


def test_roles_of_one_data_set(samples):
    assert trained(samples, roles_to_train=["user"]) == "Hello there<|im_end|>And then?<|im_end|>"


def test_a_role_without_a_name_is_refused(samples):
    record = {"messages": [{"role": "judge", "content": "a"}, TALK[2]]}
    with pytest.raises(UserError, match=r"line 1: messages\[0\]: the role must be one of .* got 'judge'; name it in"):
        samples(record, type="chat_template", roles={"user": ["human"]})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"split": "train[:10"}, "datasets.0.split: got 'train[:10'; wanted a split, or slices such as train[:500]"),
        ({"shards": 3, "shards_idx": 3}, "shards_idx: got 3; wanted below shards, which is 3"),
        ({"path": "json", "data_files": ["d.jsonl", "e.jsonl"]}, "with path json, write each file as an entry of its"),
        ({"data_files": "d.jsonl"}, "d.jsonl: data_files: only for a data set that is a folder or of the hub; remove"),
        ({"shards_idx": 1}, "shards_idx: got 1; wanted shards next to it"),
        ({"field_chosen": "a"}, "field_chosen: missing here: training on preferences"),
        ({"train_on_eos": "some"}, "train_on_eos: got 'some'"),
    ],
)
def test_what_is_missing_of_a_data_set_is_refused(samples, keys, words):
    with pytest.raises(UserError) as error:
        samples({"messages": TALK}, **keys)
    assert words in str(error.value)
