"""Tool calls in what a model writes, in the formats of Hermes (Qwen too), Llama 3 and Mistral.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them
    llama3   {"name": ..., "parameters": {...}}, after <|python_tag|> or as the whole answer; several with ";" between
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], newer: [TOOL_CALLS]name[ARGS]{...}, any number

What does not parse stays text: nothing that a model says is lost.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lorawgpu.serve.text import overlap


class Call(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Format:
    """`start`: what calls begin with; `tokens`: what may be a control token; `read`: yields (name, arguments) of what
    begins with `start`, ValueError if it is something else; `bare`: calls may also be all of an answer, as JSON."""

    start: str
    tokens: tuple[str, ...]
    read: Callable[[str], Iterator[tuple[str, object]]]
    bare: bool = False
    call_id: Callable[[], str] = lambda: "call_" + secrets.token_hex(12)


_DECODER = json.JSONDecoder()
_NAMED = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*")


def _value(text: str, at: int) -> tuple[object, int]:
    """The JSON value at `at` and where it ends. ValueError if there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _call(value: object) -> tuple[str, object]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict | str):
        raise ValueError("arguments are an object")
    return value["name"], arguments


def _hermes(text: str) -> Iterator[tuple[str, object]]:
    for part in text.split("<tool_call>")[1:]:
        body, _, after = part.partition("</tool_call>")
        if after.strip():
            raise ValueError("text after a call")
        value, end = _value(body.strip(), 0)
        if body.strip()[end:].strip():
            raise ValueError("more than one value in a call")
        yield _call(value)


def _llama3(text: str) -> Iterator[tuple[str, object]]:
    text, at = text.replace("<|python_tag|>", "").strip(), 0
    while at < len(text):
        value, at = _value(text, at)
        yield _call(value)
        while at < len(text) and text[at] in "; \n\r\t":
            at += 1


def _mistral(text: str) -> Iterator[tuple[str, object]]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = _NAMED.match(part)
        value, end = _value(part, named.end() if named else len(part) - len(part.lstrip()))
        if part[end:].strip():
            raise ValueError("text after a call")
        if named:
            yield _call({"name": named[1], "arguments": value})
        else:
            yield from map(_call, value if isinstance(value, list) else [value])


FORMATS = {
    "hermes": Format("<tool_call>", ("<tool_call>", "</tool_call>"), _hermes),
    "llama3": Format("<|python_tag|>", ("<|python_tag|>",), _llama3, bare=True),
    "mistral": Format(
        "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _mistral, call_id=lambda: secrets.token_hex(5)[:9]
    ),
}


def format_of(template: str | None) -> Format | None:
    """The format that a chat template's source shows calls in, None if it shows none that is known."""
    source = template or ""
    if "<tool_call>" in source:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in source:
        return FORMATS["mistral"]
    if "<|python_tag|>" in source or ("tools" in source and "ipython" in source):
        return FORMATS["llama3"]
    return None


class CallReader:
    """Passes an answer's text on, and holds back what may be calls until the end. `names`: of the tools."""

    def __init__(self, format: Format, names: set[str]):
        self.format, self.names = format, names
        self._held, self._calls, self._begun = "", False, False

    def push(self, text: str) -> str:
        """The part of the text that belongs to no call."""
        self._held += text
        if self._calls:
            return ""
        at = self._held.find(self.format.start)
        bare = self.format.bare and not self._begun and self._held.lstrip()[:1] == "{"
        if at >= 0 or bare:
            self._calls = True
            keep = 0 if bare else at
        elif self.format.bare and not self._begun and not self._held.strip():
            return ""  # spaces before what may be a call
        else:
            keep = len(self._held) - overlap(self._held, self.format.start)
        shown, self._held = self._held[:keep], self._held[keep:]
        self._begun |= bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """The rest: text, or calls."""
        held, self._held = self._held, ""
        if not self._calls:
            return held, []
        try:
            found = list(self.format.read(held))
        except ValueError:
            return held, []
        if not found or self.format.bare and any(name not in self.names for name, _ in found):
            return held, []
        return "", [Call(self.format.call_id(), name, _text(arguments)) for name, arguments in found]


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
