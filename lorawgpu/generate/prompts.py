"""Between text and ids: prompts to ids, and ids of an answer to text, piece by piece."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from lorawgpu.chat.arguments import Arguments, check_arguments
from lorawgpu.chat.builtin import BUILT_IN, FALLBACK
from lorawgpu.chat.template import GuardedTemplate, TemplateFailed, resolve_template
from lorawgpu.config.source import BAD_YAML, read_yaml
from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE, RUN_CONFIG_FILE, TOOL_USE_FILE
from lorawgpu.files.untrusted import read_bytes
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import MAX_TEMPLATE

MARK = "\ue000"  # a private-use character that no template changes
INCOMPLETE = "\ufffd"  # what an incomplete character decodes to


class TemplateChoice(NamedTuple):
    """A built-in name, or a file or source; neither: the model's own. `arguments`: for its variables; `tool_use`: the
    source of the template that goes with it for conversations with tools."""

    name: str | None = None
    jinja: str | None = None
    arguments: Arguments = {}
    tool_use: str | None = None


def template_for(
    tokenizer: GuardedTokenizer,
    adapter: Path | None = None,
    given: str | None = None,
    arguments: Arguments | None = None,
) -> GuardedTemplate | None:
    """The chat template for prompts: `given` (a built-in name, a file or the template itself), else the one that the
    adapter was trained with (chat_template.jinja in its folder, or the config of its run), else the model's own.

    Without `given`, the arguments of the adapter's run hold too; those in `arguments` replace them one by one.
    """
    choice = template_choice(adapter, given, arguments)
    own, special_tokens = tokenizer.chat_template, tokenizer.special_tokens
    tool_use = choice.tool_use if choice.name or choice.jinja else tokenizer.tool_use_template
    return resolve_template(choice.name, choice.jinja, own, special_tokens, choice.arguments, tool_use)


def template_choice(adapter: Path | None, given: str | None, arguments: Arguments | None = None) -> TemplateChoice:
    """The template by the rule of `template_for`. UserError for arguments that no template can have."""
    choice = TemplateChoice() if adapter is None else _of_run(adapter)
    if given is not None:
        choice = _choice(given, {})
    try:
        return choice._replace(arguments=check_arguments(choice.arguments) | check_arguments(arguments or {}))
    except ValueError as error:
        raise UserError(f"chat_template_kwargs: {error}") from None


def template_arguments(text: str | None) -> Arguments:
    """The value of --chat-template-kwargs, in JSON or YAML. UserError if it is neither."""
    try:
        return {} if text is None else yaml.safe_load(text)
    except BAD_YAML:
        raise UserError(f"--chat-template-kwargs {text}: not valid YAML; wanted '{{name: value}}'") from None


def _choice(template: str | None, arguments: Arguments) -> TemplateChoice:
    built_in = template is not None and template.removeprefix(FALLBACK) in BUILT_IN
    return TemplateChoice(template if built_in else None, None if built_in else template, arguments)


def _of_run(adapter: Path) -> TemplateChoice:
    """The template of the run that an adapter, or checkpoint, comes from.

    Only these keys are read: the run's data may be gone, and another version may have written the rest.
    """
    if (adapter / CHAT_TEMPLATE_FILE).is_file():
        tool_use = adapter / TOOL_USE_FILE
        named = read_bytes(tool_use, MAX_TEMPLATE).decode("utf-8", "replace") if tool_use.is_file() else None
        return TemplateChoice(jinja=str(adapter / CHAT_TEMPLATE_FILE), tool_use=named)  # its arguments are in it
    settings = _settings_of_run(adapter)
    found = [settings.get(key) for key in ("chat_template", "chat_template_jinja")]
    template = next((value for value in found if isinstance(value, str)), None)
    return _choice(template, settings.get("chat_template_kwargs") or {})


def _settings_of_run(adapter: Path) -> dict:
    """The keys of the run's config, if it is there."""
    for folder in (adapter, adapter.parent):
        if (folder / RUN_CONFIG_FILE).is_file():
            return read_yaml(folder / RUN_CONFIG_FILE).data
    return {}


def special_tokens_of(adapter: Path | None) -> dict[str, str]:
    """The special tokens that the run of an adapter chose, by name."""
    tokens = {} if adapter is None else _settings_of_run(adapter).get("special_tokens")
    return {k: v for k, v in tokens.items() if isinstance(v, str)} if isinstance(tokens, dict) else {}


class Prompts:
    """Turns prompts into ids. Without a `template`, only raw text is possible."""

    def __init__(self, tokenizer: GuardedTokenizer, template: GuardedTemplate | None):
        self.tokenizer, self.template = tokenizer, template

    def raw(self, text: str) -> list[int]:
        """Ids of text at the beginning of a document. Raises UserError if there are none."""
        ids = self.tokenizer.document(text)
        eos = self.tokenizer.eos_id
        if eos is not None and self.tokenizer.encode("", add_special=True)[-1:] == [eos]:
            ids = ids[:-1]  # this tokenizer appends EOS, but the text continues
        if not ids:
            raise UserError("the prompt is empty, and this model has no BOS token to start with")
        return ids

    def chat(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Ids of a conversation up to the assistant's turn. Raises UserError without a template, or if it refuses.

        A space at the end of the generation prompt ("Assistant: ") is left out: in training, the tokenizer made it
        part of the answer's first token.
        """
        if self.template is None:
            raise UserError("this model has no chat template: use --raw, or choose one with --chat-template")
        return self.tokenizer.encode(self.template.render(messages, tools, add_generation_prompt=True).rstrip(" "))

    def encode(self, prompt: str | list[dict], raw: bool = False) -> list[int]:
        """Ids of a conversation or of text. Text is a user's turn if there is a template and not `raw`."""
        if isinstance(prompt, list):
            return self.chat(prompt)
        if raw or self.template is None:
            return self.raw(prompt)
        return self.chat([{"role": "user", "content": prompt}])

    def turn_end(self) -> int | None:
        """The added token that ends an assistant's turn, or None if the template ends it with plain text."""
        if self.template is None:
            return None
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        try:
            _, found, tail = self.template.render(turn).rpartition(MARK)
        except TemplateFailed:
            return None
        ids = self.tokenizer.encode(tail.lstrip()) if found else []
        return ids[0] if ids and ids[0] in self.tokenizer.added_ids else None

    def stop_ids(self, config_ids: Sequence[int]) -> frozenset[int]:
        """All tokens that end an answer: the model's, the tokenizer's and the template's."""
        return frozenset({*config_ids, self.tokenizer.eos_id, self.turn_end()} - {None})


class TextStream:
    """Decodes ids that arrive one by one into pieces of whole characters; control tokens give no text.

    The text of a token may depend on the token before it, so a piece is the difference of two decoded texts.
    """

    def __init__(self, tokenizer: GuardedTokenizer, strip: bool = False):
        self.tokenizer, self.strip = tokenizer, strip  # strip: drop the space that `Prompts.chat` left out
        self.ids: list[int] = []
        self._begin = self._shown = 0  # ids[_begin:_shown] were shown; they are decoded again as context

    @classmethod
    def resumed(cls, tokenizer: GuardedTokenizer, tail: Sequence[int], shown: int, strip: bool) -> "TextStream":
        """The stream that had this `state`."""
        stream = cls(tokenizer, strip)
        stream.ids, stream._shown = list(tail), shown
        return stream

    @property
    def state(self) -> tuple[list[int], int, bool]:
        """The ids that the next piece depends on, how many of them were shown, and `strip`."""
        return self.ids[self._begin :], self._shown - self._begin, self.strip

    def push(self, token: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        self.ids.append(token)
        return self._next(flush=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters included."""
        return self._next(flush=True)

    def _next(self, flush: bool) -> str:
        before = self._decode(self.ids[self._begin : self._shown])
        text = self._decode(self.ids[self._begin :])
        if len(text) <= len(before) or (text.endswith(INCOMPLETE) and not flush):
            return ""
        piece = text[len(before) :]
        self._begin, self._shown = self._shown, len(self.ids)
        if self.strip:
            self.strip, piece = False, piece.removeprefix(" ")
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True)
