"""Records whose keys have other names than those of our formats, as axolotl's data-set keys describe them.

A record is rewritten before its format is read, so the tokens are those of a copy of the data with our names.
"""

import json
import re
from dataclasses import dataclass, field, fields

from lorawgpu.data.bad_line import SourceLine, bad_line
from lorawgpu.data.formats import SPEAKERS
from lorawgpu.data.prompt_format import prompt_of
from lorawgpu.files.untrusted import brief

THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# Our key of a record: the field that names the key in the data.
RECORD_KEYS = {
    "instruction": "field_instruction", "input": "field_input", "output": "field_output", "system": "field_system",
    "tools": "field_tools", "text": "field",
}  # fmt: skip


def _key(meaning: str = "", default: object = None, **kwargs):
    return field(default=default, metadata={"meaning": meaning}, **kwargs)


def _map(meaning: str):
    return field(default_factory=dict, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Renaming:
    """Names of the keys in the data, and changes of their records; config/types.py makes keys of a data set of these.

    None or empty: as in our formats.
    """

    field_messages: str | None = _key("The key of the conversation in a record, instead of `messages`.")
    message_property_mappings: dict[str, str] = _map("The keys of a message, as `{role: from, content: value}`.")
    roles: dict[str, list[str]] = _map(
        "What the data call the roles, as `{user: [human], assistant: [bot]}`, besides the usual names."
    )
    drop_system_message: bool = _key("Leave out system messages.", False)
    message_field_training: str | None = _key("The key of a message that says whether to train on it.")
    field_thinking: str | None = _key("The key of a message's reasoning, instead of `reasoning_content`.")
    template_thinking_key: str | None = _key("The name by which the chat template reads the reasoning.")
    split_thinking: bool = _key("Take `<think>...</think>` at the start of an answer as its reasoning.", False)
    field_instruction: str | None = _key("The key of a question, instead of `instruction`.")
    field_input: str | None = _key("The key of what a question is about, instead of `input`.")
    field_output: str | None = _key("The key of the answer, instead of `output`.")
    field_system: str | None = _key("The key of the system message, instead of `system`.")
    field_tools: str | None = _key("The key of the tools, instead of `tools`.")
    field: str | None = _key("The key of the text, instead of `text`.")
    format: str | None = _key(
        "The prompt of a question, as `[INST] {instruction} {input} [/INST]`, instead of the chat template; the answer "
        "follows."
    )
    no_input_format: str | None = _key("The same without an input.")
    system_format: str | None = _key("What precedes the prompt if there is a system message, by default `{system}`.")
    system_prompt: str | None = _key("The system message of records that have none, with `format`.")

    @property
    def kind(self) -> str | None:
        """The format that the names are for, None if they do not tell."""
        set_here = {f.name for f in fields(self) if getattr(self, f.name)}
        if self.format:
            return "prompt_completion"
        if set_here & {"field_instruction", "field_output"}:
            return "alpaca"
        if "field" in set_here:
            return "text"
        return "chat" if set_here - {"field_input", "field_system", "field_tools"} else None

    def apply(self, record: dict, kind: str, source: SourceLine) -> dict:
        """The record under our names. BadLine if its messages are not what the names say."""
        if self.format:
            return self._written(record, source)
        out = dict(record)
        for ours, name in RECORD_KEYS.items():
            theirs = getattr(self, name)
            if theirs and theirs in record:
                if theirs != ours:
                    out.pop(theirs, None)
                out[ours] = record[theirs]
        if kind == "chat":
            self._messages(record, out, source)
        return out

    def _written(self, record: dict, source: SourceLine) -> dict:
        """The prompt and its answer. `system_prompt` is not for records with a key of their own, as in axolotl."""
        texts = {}
        for ours in ("instruction", "input", "output", "system"):
            key = getattr(self, RECORD_KEYS[ours]) or ours
            if key not in record and ours in ("instruction", "output"):
                have = ", ".join(f"`{k}`" for k in record) or "none"
                raise bad_line(*source, f"a record with `format` needs the key `{key}`; it has {have}")
            value = record.get(key)
            if not isinstance(value, str | None):
                raise bad_line(*source, f"`{key}` must be a string, got {type(value).__name__}", value)
            texts[ours] = value or ""
        texts["system"] = texts["system"] or self.system_prompt or ""
        prompt = prompt_of(self.format, self.no_input_format, self.system_format, texts)
        return {"prompt": prompt, "completion": texts["output"]}

    def _messages(self, record: dict, out: dict, source: SourceLine) -> None:
        key = self.field_messages or "messages"
        if key not in record:
            return
        turns = record[key]
        if isinstance(turns, str):  # a list in a cell of a table
            try:
                turns = json.loads(turns)
            except (ValueError, RecursionError):
                pass
        out.pop(key)
        out["messages"] = turns
        if isinstance(turns, list):
            messages = [self._message(turn, f"{key}[{i}]", source) for i, turn in enumerate(turns)]
            if self.drop_system_message:
                messages = [m for m in messages if not (isinstance(m, dict) and m.get("role") == "system")]
            out["messages"] = messages

    def _message(self, turn: object, where: str, source: SourceLine) -> object:
        if not isinstance(turn, dict):
            return turn
        names = self.message_property_mappings
        if not names and "role" not in turn and "from" in turn:
            names = {"role": "from", "content": "value"}
        message = {key: value for key, value in turn.items() if key not in names.values()}
        message |= {ours: turn[theirs] for ours, theirs in names.items() if theirs in turn}
        known = SPEAKERS | {name: ours for ours, names in self.roles.items() for name in names}
        role = message.get("role")
        if isinstance(role, str) and role in known:
            message["role"] = known[role]
        elif self.roles:
            have = ", ".join(known)
            raise bad_line(*source, f"{where}: the role must be one of {have}, got {brief(role)}; name it in `roles`")
        if self.message_field_training and self.message_field_training in turn:
            message["train"] = message.pop(self.message_field_training)
        self._thinking(message)
        return message

    def _thinking(self, message: dict) -> None:
        key = self.template_thinking_key or "reasoning_content"
        if self.field_thinking and self.field_thinking in message:
            message[key] = message.pop(self.field_thinking)
        content = message.get("content")
        if self.split_thinking and message.get("role") == "assistant" and isinstance(content, str):
            if found := THINKING.match(content):
                message[key], message["content"] = found[1].strip(), content[found.end() :]
