"""Records whose keys have other names than those of our formats, as axolotl's data-set keys describe them.

A record is rewritten before its format is read, so the tokens are those of a copy of the data with our names.
"""

import json
import re
from dataclasses import dataclass, fields

from lorawgpu.data.formats import SPEAKERS, SourceLine
from lorawgpu.data.read_files import bad_line
from lorawgpu.files.untrusted import brief

THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# Our key of a record: the field that names the key in the data.
RECORD_KEYS = {
    "instruction": "field_instruction", "input": "field_input", "output": "field_output", "system": "field_system",
    "tools": "field_tools", "text": "field",
}  # fmt: skip


@dataclass(frozen=True)
class Renaming:
    """Names of the keys in the data, under the names of the config's keys; None: as in our formats.

    `message_property_mappings`: (ours, theirs) of a message's keys; `roles`: (theirs, ours).
    """

    field_messages: str | None = None
    field_instruction: str | None = None
    field_input: str | None = None
    field_output: str | None = None
    field_system: str | None = None
    field_tools: str | None = None
    field: str | None = None
    message_property_mappings: tuple[tuple[str, str], ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    field_thinking: str | None = None
    template_thinking_key: str | None = None
    message_field_training: str | None = None
    drop_system_message: bool = False
    split_thinking: bool = False

    @property
    def kind(self) -> str | None:
        """The format that the names are for, None if they do not tell."""
        set_here = {f.name for f in fields(self) if getattr(self, f.name)}
        if set_here & {"field_instruction", "field_output"}:
            return "alpaca"
        if "field" in set_here:
            return "text"
        return "chat" if set_here - {"field_input", "field_system", "field_tools"} else None

    def apply(self, record: dict, kind: str, source: SourceLine) -> dict:
        """The record under our names. BadLine if its messages are not what the names say."""
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
        names = dict(self.message_property_mappings)
        if not names and "role" not in turn and "from" in turn:
            names = {"role": "from", "content": "value"}
        message = {key: value for key, value in turn.items() if key not in names.values()}
        message |= {ours: turn[theirs] for ours, theirs in names.items() if theirs in turn}
        role, known = message.get("role"), SPEAKERS | dict(self.roles)
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
