"""The record formats: detected by their keys, and converted to one of three classes that can be encoded.

| type | keys | becomes |
|---|---|---|
| `chat` | `messages` (`tools`) | Chat |
| `conversations` | `conversations` with `from` and `value` (`system`, `tools`) | Chat |
| `alpaca` | `instruction`, `output` (`input`, `system`) | Chat |
| `prompt_completion` | `prompt`, `completion`: two strings, or two message lists (`tools`) | Text or Chat |
| `segments` | `segments`: list of `label`, `text` | Text, nothing added |
| `text` | `text` | Text |
| `pretokenized` | `input_ids` (`labels`, `attention_mask`) | Tokens |

Other names of these keys are recognized where they are clear: see `field_names`.

The pieces of a Text (`prompt` and `completion`, or `segments`) are joined before they are tokenized. A token that spans
trained and untrained text is trained, and counted (`Counts.boundary_tokens`). The first token of a sample is never a
target, whatever its piece says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lorawgpu.data.bad_line import SourceLine, bad_line
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.field_names import ALPACA, CONVERSATIONS, Fields, candidates, fields_of, other_type
from lorawgpu.data.record_values import content_of, flag_of, integers_of, list_of, string_of
from lorawgpu.data.tools import tool_calls_of, tools_of
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.util.suggest import nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "chatgpt": "assistant", "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template. `train[i]`: the message's own `train` flag, or None to go by its role.

    The first `prompt` messages are context: not trained unless their own flag says so. `functions`: the record has
    some, which no template reads.
    """

    messages: list[dict]
    train: list[bool | None]
    tools: list[dict] | None = None
    prompt: int = 0
    functions: bool = False


@dataclass(frozen=True)
class Text:
    """Pieces of text, joined unchanged. `whole`: a document, with the tokenizer's BOS, if any, and an EOS."""

    pieces: list[tuple[str, bool]]  # (text, trained)
    whole: bool


@dataclass(frozen=True)
class Tokens:
    """Token ids and labels from the file."""

    input_ids: list[int]
    labels: list[int]


Example = Chat | Text | Tokens


def detect_type(record: dict, source: SourceLine) -> str:
    """The type whose keys the record has. BadLine if no type fits, or several do: then `type` must name it."""
    found = [name for name, (keys, _) in FORMATS.items() if all(key in record for key in keys)]
    if len(found) == 1:
        return found[0]
    if not found and (kind := other_type(record)):
        return kind
    have = ", ".join(f"`{key}`" for key in record) or "none"
    if found:
        what = (
            f"the keys fit several formats ({', '.join(found)}); set `type:` in the data set's config entry, "
            "or remove the keys of the others"
        )
    else:
        known = "; ".join(f"{name}: {' + '.join(keys)}" for name, (keys, _) in FORMATS.items())
        what = (
            f"no known format has these keys: {have}. A question and its answer are mapped by these lines in the data "
            f"set's entry:{_mapping(record)}\nWithout them, wanted one of {known}"
        )
    raise bad_line(*source, what)


def _mapping(record: dict) -> str:
    """The lines of a data set's entry that say which keys are a question and its answer, as far as they are known."""
    questions, answers = candidates(record)
    texts = [key for key, value in record.items() if isinstance(value, str)]
    if not (questions and answers) and len(texts) == 2:
        questions, answers = questions or texts[:1], answers or texts[1:]
    lines = {"type": ["alpaca"], "field_instruction": questions or ["KEY"], "field_output": answers or ["KEY"]}
    return "".join(f"\n    {name}: {' # or '.join(keys)}" for name, keys in lines.items())


def check_type(name: str) -> str:
    """The canonical name of a declared type, which may be another tool's name for it. UserError if it is unknown."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        meant = nearest(name, [*FORMATS, *ALIASES])
        hint = f"; the nearest one is {meant!r}" if meant else ""
        raise UserError(f"unknown data set type `{name}`; wanted one of {', '.join(FORMATS)}{hint}")
    return name


def to_example(kind: str, record: dict, source: SourceLine, first: SourceLine | None = None) -> Example:
    """Convert a record of type `kind`. BadLine, naming file, line and key, if it is malformed.

    `first`: the record that the type was detected from, None if it was declared.
    """
    keys, convert = FORMATS.get(kind) or _by_other_names(kind)
    for key in keys:
        if key not in record:
            have = ", ".join(f"`{k}`" for k in record)
            what = f"a record of type {kind} needs the key `{key}`; it has {have or 'none'}"
            if first:
                what += (
                    f". The type was detected from {first[0]}, line {first[1]}; put records of another type in a "
                    "data set of their own"
                )
            raise bad_line(*source, what)
    return convert(record, source)


def _chat(record: dict, source: SourceLine) -> Chat:
    chat = _messages(record["messages"], source, "messages", tools_of(record, source))
    return replace(chat, functions=bool(record.get("functions")))


def _by_other_names(kind: str) -> tuple[tuple[str, ...], Callable[[dict, SourceLine], Example]]:
    """The entry of FORMATS for a type of `other_type`."""
    if kind in CONVERSATIONS:
        return (kind,), partial(_conversations, key=kind)
    return tuple(kind.split("/")), lambda record, source: _alpaca(record, source, fields_of(kind, record))


def _conversations(record: dict, source: SourceLine, key: str = "conversations") -> Chat:
    turns = list_of(record[key], source, key)
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": string_of(record["system"], source, "system")})
    for number, turn in enumerate(turns):
        where = f"{key}[{number}]"
        if not isinstance(turn, dict):
            raise bad_line(*source, f"{where} must be an object", turn)
        messages.append(turn if "role" in turn else _spoken(turn, source, where))
    chat = _messages(messages, source, key, tools_of(record, source))
    return replace(chat, functions=bool(record.get("functions")))


def _spoken(turn: dict, source: SourceLine, where: str) -> dict:
    """A turn with `from` and `value` as a message."""
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise bad_line(*source, f"{where}: `from` must be one of {', '.join(SPEAKERS)}, got {brief(speaker)}")
    rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": turn.get("value"), **rest}


def _alpaca(record: dict, source: SourceLine, keys: Fields = ALPACA) -> Chat:
    """`input` follows the instruction after a blank line; the alpaca template gets both separately as well."""
    instruction = string_of(record[keys.question], source, keys.question)
    given = string_of(record.get(keys.context) or "", source, keys.context)
    system = string_of(record.get(keys.system) or "", source, keys.system)
    user = {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction}
    if given:
        user |= {"instruction": instruction, "input": given}
    answer = {"role": "assistant", "content": string_of(record[keys.answer], source, keys.answer)}
    messages = [{"role": "system", "content": system}] if system else []
    return Chat([*messages, user, answer], [None] * (len(messages) + 2))


def _prompt_completion(record: dict, source: SourceLine) -> Text | Chat:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text([(prompt, False), (completion, True)], whole=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        tools = tools_of(record, source)
        before, after = _messages(prompt, source, "prompt", tools), _messages(completion, source, "completion", tools)
        return Chat(before.messages + after.messages, before.train + after.train, tools, prompt=len(before.messages))
    got = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise bad_line(*source, f"`prompt` and `completion` must be two strings or two lists of messages, got {got}")


def _segments(record: dict, source: SourceLine) -> Text:
    pieces = []
    for number, segment in enumerate(list_of(record["segments"], source, "segments")):
        where = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise bad_line(*source, f"{where} must be an object with `label` (true or false) and `text`", segment)
        pieces.append((string_of(segment.get("text"), source, f"{where}.text"), segment["label"]))
    return Text(pieces, whole=False)


def _text(record: dict, source: SourceLine) -> Text:
    text = string_of(record["text"], source, "text")
    if not text:
        raise bad_line(*source, "`text` is empty: nothing to train on")
    return Text([(text, True)], whole=True)


def _pretokenized(record: dict, source: SourceLine) -> Tokens:
    """`attention_mask` 0 marks padding, which is removed; without `labels` every token is a target."""
    ids = integers_of(record["input_ids"], source, "input_ids", least=0)
    labels = integers_of(record.get("labels", ids), source, "labels", least=IGNORE)
    mask = integers_of(record.get("attention_mask", [1] * len(ids)), source, "attention_mask", least=0)
    if not len(ids) == len(labels) == len(mask):
        got = f"{len(ids)}, {len(labels)} and {len(mask)}"
        raise bad_line(*source, f"`input_ids`, `labels` and `attention_mask` differ in length: {got}")
    wrong = next((label for label in labels if label < 0 and label != IGNORE), None)
    if wrong is not None:
        raise bad_line(*source, f"`labels` contains {wrong}; wanted token ids, or {IGNORE} for no loss")
    kept = [i for i, used in enumerate(mask) if used]
    return Tokens([ids[i] for i in kept], [labels[i] for i in kept])


FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict, SourceLine], Example]]] = {
    "chat": (("messages",), _chat),
    "conversations": (("conversations",), _conversations),
    "alpaca": (("instruction", "output"), _alpaca),
    "prompt_completion": (("prompt", "completion"), _prompt_completion),
    "segments": (("segments",), _segments),
    "text": (("text",), _text),
    "pretokenized": (("input_ids",), _pretokenized),
}
ALIASES = {
    "messages": "chat", "chat_template": "chat", "chat_template.default": "chat", "sharegpt": "conversations",
    "completion": "text", "input_output": "segments", "pretokenised": "pretokenized", "tokens": "pretokenized",
}  # fmt: skip


def _messages(value: object, source: SourceLine, key: str, tools: list[dict] | None) -> Chat:
    messages, train = [], []
    for number, message in enumerate(list_of(value, source, key)):
        if _is_plain(message):
            messages.append(message)
            train.append(None)
            continue
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            raise bad_line(*source, f"{where} must be an object with `role` and `content`", message)
        if "role" not in message and "from" in message:
            message = _spoken(message, source, where)
        if message.get("role") not in ROLES:
            got = brief(message.get("role"))
            raise bad_line(*source, f"{where}: `role` must be one of {', '.join(ROLES)}, got {got}")
        message = message | {"content": content_of(message, source, where)}
        if message.get("tool_calls"):
            message["tool_calls"] = tool_calls_of(message["tool_calls"], tools, source, where)
        train.append(flag_of(message, source, where))
        messages.append({k: v for k, v in message.items() if v is not None and k not in ("train", "weight")})
    if not messages:
        raise bad_line(*source, f"`{key}` is empty")
    return Chat(messages, train, tools)


def _is_plain(message: object) -> bool:
    """Just a role and a string: nothing to check, and the fast path for most messages."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )
