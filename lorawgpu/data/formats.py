"""What a record means: recognised by its keys, turned into one of three things that can be encoded.

| type | keys | becomes |
|---|---|---|
| `chat` | `messages` (`tools`) | Chat |
| `conversations` | `conversations` with `from` and `value` (`system`, `tools`) | Chat |
| `alpaca` | `instruction`, `output` (`input`, `system`) | Chat |
| `prompt_completion` | `prompt`, `completion`: two texts, or two message lists (`tools`) | Text, or Chat |
| `segments` | `segments`: list of `label`, `text` | Text, nothing added |
| `text` | `text` | Text |
| `pretokenized` | `input_ids` (`labels`, `attention_mask`) | Tokens |

Pieces of a Text (`prompt` and `completion`, the `segments`) are joined before they are tokenised. A token across a
border of trained and untrained text belongs to the trained piece: it is trained, and counted (`Counts.shared`). The
first token of a sample has nothing before it and is never trained, whatever its piece says.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from lorawgpu.data.batching import IGNORE
from lorawgpu.data.read_files import bad_line
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
    """Messages for a template. `train[i]`: True or False where the record says so, None where the role decides.

    The first `prompt` messages are not trained for their role.
    """

    messages: list[dict]
    train: list[bool | None]
    tools: list[dict] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Text:
    """Pieces of text joined as they are. `whole`: a document, with BOS as the tokenizer does and EOS at its end."""

    pieces: list[tuple[str, bool]]  # (text, trained)
    whole: bool


@dataclass(frozen=True)
class Tokens:
    """Token ids as the file gives them."""

    input_ids: list[int]
    labels: list[int]


Example = Chat | Text | Tokens
Place = tuple[str, int]  # file, line


def detect_type(record: dict, place: Place) -> str:
    """The one type whose keys a record has. UserError when none or several fit: then `type` must say it."""
    found = [name for name, (keys, _) in FORMATS.items() if all(key in record for key in keys)]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"`{key}`" for key in record) or "none"
    if found:
        what = (
            f"the keys fit several formats ({', '.join(found)}): say which with `type:` in the data set's "
            "entry of a config, or leave the others' keys out"
        )
    else:
        known = "; ".join(f"{name}: {' + '.join(keys)}" for name, (keys, _) in FORMATS.items())
        what = f"no known format has these keys: {have}; known are {known}"
    raise bad_line(*place, what)


def check_type(name: str) -> str:
    """A declared type under its own name, other tools' names understood. UserError for an unknown one."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        meant = nearest(name, [*FORMATS, *ALIASES])
        hint = f"; the nearest one is {meant!r}" if meant else ""
        raise UserError(f"data set type `{name}` is unknown; wanted one of {', '.join(FORMATS)}{hint}")
    return name


def to_example(kind: str, record: dict, place: Place, first: Place | None = None) -> Example:
    """Read a record as `kind`. BadLine naming file, line and key when it does not have that form.

    `first`: the record that the type was recognised by, None where it was declared.
    """
    keys, convert = FORMATS[kind]
    for key in keys:
        if key not in record:
            have = ", ".join(f"`{k}`" for k in record)
            what = f"a record of type {kind} needs the key `{key}`; it has {have or 'none'}"
            if first:
                what += (
                    f". The type was recognised by the keys of {first[0]}, line {first[1]}, and holds for all of this "
                    "data set: data of another form need a data set of their own"
                )
            raise bad_line(*place, what)
    return convert(record, place)


def _chat(record: dict, place: Place) -> Chat:
    return _messages(record["messages"], place, "messages", _tools(record, place))


def _conversations(record: dict, place: Place) -> Chat:
    turns = _list(record["conversations"], place, "conversations")
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": _string(record["system"], place, "system")})
    for number, turn in enumerate(turns):
        where = f"conversations[{number}]"
        if not isinstance(turn, dict):
            raise bad_line(*place, f"{where} must be an object", turn)
        if "role" in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise bad_line(*place, f"{where}: `from` must be one of {', '.join(SPEAKERS)}, got {brief(speaker)}")
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        messages.append({"role": SPEAKERS[speaker], "content": turn.get("value"), **rest})
    return _messages(messages, place, "conversations", _tools(record, place))


def _alpaca(record: dict, place: Place) -> Chat:
    """`input` follows the instruction after a blank line; the alpaca template finds both apart and titles them."""
    instruction = _string(record["instruction"], place, "instruction")
    given = _string(record.get("input") or "", place, "input")
    system = _string(record.get("system") or "", place, "system")
    user = {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction}
    if given:
        user |= {"instruction": instruction, "input": given}
    answer = {"role": "assistant", "content": _string(record["output"], place, "output")}
    messages = [{"role": "system", "content": system}] if system else []
    return Chat([*messages, user, answer], [None] * (len(messages) + 2))


def _prompt_completion(record: dict, place: Place) -> Text | Chat:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text([(prompt, False), (completion, True)], whole=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        tools = _tools(record, place)
        before, after = _messages(prompt, place, "prompt", tools), _messages(completion, place, "completion", tools)
        return Chat(before.messages + after.messages, before.train + after.train, tools, prompt=len(before.messages))
    got = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise bad_line(*place, f"`prompt` and `completion` must be two strings or two lists of messages, got {got}")


def _segments(record: dict, place: Place) -> Text:
    pieces = []
    for number, segment in enumerate(_list(record["segments"], place, "segments")):
        where = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise bad_line(*place, f"{where} must be an object with `label` (true or false) and `text`", segment)
        pieces.append((_string(segment.get("text"), place, f"{where}.text"), segment["label"]))
    return Text(pieces, whole=False)


def _text(record: dict, place: Place) -> Text:
    text = _string(record["text"], place, "text")
    if not text:
        raise bad_line(*place, "`text` is empty: there is nothing to train")
    return Text([(text, True)], whole=True)


def _pretokenized(record: dict, place: Place) -> Tokens:
    """`attention_mask` 0 marks padding, which is left out; without `labels` every token is trained."""
    ids = _integers(record["input_ids"], place, "input_ids", least=0)
    labels = _integers(record.get("labels", ids), place, "labels", least=IGNORE)
    mask = _integers(record.get("attention_mask", [1] * len(ids)), place, "attention_mask", least=0)
    if not len(ids) == len(labels) == len(mask):
        raise bad_line(*place, f"`input_ids` holds {len(ids)} tokens, `labels` {len(labels)}: they must be as many")
    wrong = next((label for label in labels if label < 0 and label != IGNORE), None)
    if wrong is not None:
        raise bad_line(*place, f"`labels` holds {wrong}: a label is a token id, or {IGNORE} where there is no loss")
    kept = [i for i, used in enumerate(mask) if used]
    return Tokens([ids[i] for i in kept], [labels[i] for i in kept])


FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict, Place], Example]]] = {
    "chat": (("messages",), _chat),
    "conversations": (("conversations",), _conversations),
    "alpaca": (("instruction", "output"), _alpaca),
    "prompt_completion": (("prompt", "completion"), _prompt_completion),
    "segments": (("segments",), _segments),
    "text": (("text",), _text),
    "pretokenized": (("input_ids",), _pretokenized),
}
ALIASES = {
    "messages": "chat", "chat_template": "chat", "sharegpt": "conversations", "completion": "text",
    "input_output": "segments", "pretokenised": "pretokenized", "tokens": "pretokenized",
}  # fmt: skip


def _messages(value: object, place: Place, key: str, tools: list[dict] | None) -> Chat:
    messages, train = [], []
    for number, message in enumerate(_list(value, place, key)):
        if _is_plain(message):
            messages.append(message)
            train.append(None)
            continue
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            raise bad_line(*place, f"{where} must be an object with `role` and `content`", message)
        if "role" not in message and "from" in message:
            raise bad_line(*place, f"{where} has `from` and `value`: that is the key `conversations`, not `{key}`")
        if message.get("role") not in ROLES:
            got = brief(message.get("role"))
            raise bad_line(*place, f"{where}: `role` must be one of {', '.join(ROLES)}, got {got}")
        message = message | {"content": _content(message, place, where)}
        train.append(_flag(message, place, where))
        messages.append({k: v for k, v in message.items() if v is not None and k not in ("train", "weight")})
    if not messages:
        raise bad_line(*place, f"`{key}` is empty")
    return Chat(messages, train, tools)


def _is_plain(message: object) -> bool:
    """A role and a text and nothing else: there is nothing to look into, and most messages are so."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )


def _flag(message: dict, place: Place, where: str) -> bool | None:
    """`train: false`, or OpenAI's `weight: 0`: this turn carries no loss."""
    flag = message.get("train", message.get("weight"))
    if flag not in (None, True, False):
        raise bad_line(*place, f"{where}: `train` must be true or false (`weight` 0 or 1), got {brief(flag)}")
    return None if flag is None else bool(flag)


def _content(message: dict, place: Place, where: str) -> str | None:
    """The text of a message, its parts joined: most templates would print a list of parts as Python writes it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content in (None, []) and message.get("tool_calls"):
        return None
    if not isinstance(content, list):
        got = "nothing" if content is None else type(content).__name__
        raise bad_line(*place, f"{where}: `content` must be a string, got {got}", message)
    if not content:
        raise bad_line(*place, f"{where}: `content` is a list without a part")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise bad_line(*place, f"{where}: only parts of type text can be trained, got one of {brief(kind)}", part)
        if not isinstance(part.get("text"), str):
            raise bad_line(*place, f"{where}: a part of type text has no string in `text`", part)
    return "".join(part["text"] for part in content)


def _tools(record: dict, place: Place) -> list[dict] | None:
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise bad_line(*place, f"`tools` is a string that is not valid JSON ({error})", tools) from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise bad_line(*place, "`tools` must be a list of objects", tools)
    return tools


def _list(value: object, place: Place, key: str) -> list:
    if not isinstance(value, list):
        raise bad_line(*place, f"`{key}` must be a list, got {type(value).__name__}", value)
    return value


def _string(value: object, place: Place, key: str) -> str:
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise bad_line(*place, f"`{key}` must be a string, got {got}", None if value is None else value)
    return value


def _integers(value: object, place: Place, key: str, least: int) -> list[int]:
    for number, item in enumerate(_list(value, place, key)):
        if type(item) is not int or not least <= item < 2**31:
            raise bad_line(*place, f"`{key}[{number}]` must be an integer of at least {least}, got {brief(item)}")
    return value
