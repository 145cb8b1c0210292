"""Ollama: a Modelfile next to a GGUF file. Its TEMPLATE says in Go's template language what the chat template says.

A chat template that writes turns one after another is known by the text between contents. That text is found by
rendering a few conversations with marks for contents, and the Go template is made of it. It is written only if it
agrees with the chat template on all of `CONVERSATIONS`.
Variables: https://github.com/ollama/ollama/blob/main/docs/template.md
"""

import json
from dataclasses import dataclass
from datetime import datetime

from lorawgpu.chat.template import ChatTemplate
from lorawgpu.errors import UserError

LONG_AGO = datetime(2001, 1, 1)
S, U, A, V = (f"\ue010{name}\ue011" for name in "suav")  # contents that no template changes
TEXTS = ("Hello!", "What is 2 + 2?\n\nShow your work: {{ x }} <b> & \"quotes\" 'single' \\ back", "héllo 日本 😀", "a")


def _turns(count: int, system: str | None = None) -> list[dict]:
    roles = ["user", "assistant"] * count
    turns = [{"role": role, "content": TEXTS[(i + count) % 4]} for i, role in enumerate(roles[: 2 * count - 1])]
    return ([{"role": "system", "content": system}] if system else []) + turns


SYSTEMS = (None, "You are terse.", "Line one.\nLine two.", TEXTS[1])
CONVERSATIONS = [_turns(count, system) for count in (1, 2, 3, 4, 5) for system in SYSTEMS]


@dataclass(frozen=True)
class Pieces:
    """The text around contents: before the first user's; before and after a system message that comes first; between
    a user's turn and an assistant's, and back; and after the last user's turn, up to the answer."""

    first: str
    system: tuple[str, str] | None
    to_assistant: str
    to_user: str
    last: str

    def render(self, messages: list[dict]) -> str:
        """What the Go template makes of a conversation that ends with a user's turn."""
        text, before = "", self.first
        for message in messages:
            if message["role"] == "system":
                before, after = self.system
                text, before = text + before + message["content"], after
            else:
                text += before + message["content"]
                before = self.to_assistant if message["role"] == "user" else self.to_user
        return text + self.last

    def go(self) -> str:
        """The template in Go's language."""
        lines = ["{{- $start := true }}", '{{- $role := "" }}', "{{- range .Messages }}"]
        if self.system:
            before, after = map(_literal, self.system)
            lines.append('{{- if eq .Role "system" }}' + before + "{{ .Content }}" + after + "{{- $start = false }}")
        lines += [
            ("{{- else if" if self.system else "{{- if")
            + ' eq .Role "assistant" }}'
            + _literal(self.to_assistant)
            + "{{ .Content }}",
            '{{- else if eq $role "assistant" }}' + _literal(self.to_user) + "{{ .Content }}",
            "{{- else if $start }}" + _literal(self.first) + "{{ .Content }}",
            "{{- else }}{{ .Content }}",
            "{{- end }}",
            "{{- $role = .Role }}",
            "{{- end }}",
            '{{- if ne $role "assistant" }}' + _literal(self.last) + "{{ end }}",
        ]
        return "\n".join(lines)


def _literal(text: str) -> str:
    """Text as an action of a Go template that prints it."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def pieces_of(template: ChatTemplate, bos: str | None) -> Pieces:
    """The pieces of a chat template. `bos`: the token that the tokenizer adds by itself, which Ollama lets it do.

    UserError, with the reason, if the template does more than Go's can say.
    """
    question = [{"role": "user", "content": U}]
    if template.render(question) != template.at(LONG_AGO).render(question):
        raise UserError("it shows the date")
    user, assistant, more = ({"role": r, "content": c} for r, c in (("user", U), ("assistant", A), ("user", V)))

    def parts(*messages: dict) -> list[str]:
        text = template.render(list(messages), add_generation_prompt=True).removeprefix(bos or "")
        found = []
        for message in messages:
            before, mark, text = text.partition(message["content"])
            if not mark:
                raise UserError(f"it does not show every message of a {message['role']} as it is")
            found.append(before)
        return [*found, text]

    first, last = parts(user)
    opening, to_assistant, to_user, ending = parts(user, assistant, more)
    if (opening, ending) != (first, last):
        raise UserError("its first turn or its last one depends on the turns between them")
    try:
        before, after, again = parts({"role": "system", "content": S}, user)
        system = (before, after) if again == last else None
    except UserError:
        system = None
    pieces = Pieces(first, system, to_assistant, to_user, last)
    for messages in CONVERSATIONS:
        if system is None and messages[0]["role"] == "system":
            continue
        if pieces.render(messages) != template.render(messages, add_generation_prompt=True).removeprefix(bos or ""):
            raise UserError(f"it does more than put text around messages, as in a conversation of {len(messages)}")
    return pieces


def modelfile(base: str, adapter: str | None, template: str | None, stops: list[str], system: str | None) -> str:
    """The text of a Modelfile. Paths are relative to it, or absolute."""
    lines = [f"FROM {base}"]
    lines += [f"ADAPTER {adapter}"] if adapter else []
    lines += [f'TEMPLATE """{template}"""'] if template else []
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    lines += [f'SYSTEM """{system}"""'] if system else []
    return "\n".join(lines) + "\n"
