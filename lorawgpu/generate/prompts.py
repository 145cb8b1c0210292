"""Between text and ids: prompts as the model is asked them, and answers that appear character by character."""

from collections.abc import Sequence
from pathlib import Path

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate, TemplateFailed, resolve_template
from lorawgpu.config.schema import load_config
from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE, RUN_CONFIG_FILE
from lorawgpu.tokenizer.hf import Tokenizer

MARK = "\ue000"  # a private character: no template changes it
CUT = "\ufffd"  # what bytes decode to that end inside a character


def template_for(tokenizer: Tokenizer, adapter: Path | None = None, given: str | None = None) -> ChatTemplate | None:
    """The template to ask with: `given` (a built-in's name, a file or the text), else what the adapter was trained
    with (its folder's chat_template.jinja, or the config of its run), else the model's own."""
    name, jinja = (given, None) if given in BUILT_IN else (None, given)
    if given is None and adapter is not None:
        name, jinja = _of_run(adapter)
    return resolve_template(name, jinja, tokenizer.chat_template, tokenizer.special_tokens)


def _of_run(adapter: Path) -> tuple[str | None, str | None]:
    """Name or text of the template of the run that made an adapter, or whose checkpoint it is."""
    if (adapter / CHAT_TEMPLATE_FILE).is_file():
        return None, str(adapter / CHAT_TEMPLATE_FILE)
    for folder in (adapter, adapter.parent):
        if (folder / RUN_CONFIG_FILE).is_file():
            config = load_config(folder / RUN_CONFIG_FILE)
            return config.chat_template, config.chat_template_jinja
    return None, None


class Prompts:
    """Turns prompts into ids. `template` None: only raw text can be asked."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        self.tokenizer, self.template = tokenizer, template

    def raw(self, text: str) -> list[int]:
        """Ids of a text as a document begins. UserError when there are none."""
        ids = self.tokenizer.encode(text, add_special=True)
        eos = self.tokenizer.eos_id
        if eos is not None and self.tokenizer.encode("", add_special=True)[-1:] == [eos]:
            ids = ids[:-1]  # a tokenizer that closes texts: this one is to go on
        if not ids:
            raise UserError("the prompt is empty, and this model has no token that begins a text")
        return ids

    def chat(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. UserError without a template, or when it refuses.

        A blank at the end of the generation prompt ("Assistant: ") is left out: in training the tokenizer has made it
        the beginning of the answer's first word.
        """
        if self.template is None:
            raise UserError("this model has no chat template: ask with --raw, or name one with --chat-template")
        return self.tokenizer.encode(self.template.render(messages, add_generation_prompt=True).rstrip(" "))

    def ask(self, prompt: str | list[dict], raw: bool = False) -> list[int]:
        """Ids of a conversation, or of a text: a user's turn where there is a template, unless it is to be raw."""
        if isinstance(prompt, list):
            return self.chat(prompt)
        if raw or self.template is None:
            return self.raw(prompt)
        return self.chat([{"role": "user", "content": prompt}])

    def turn_end(self) -> int | None:
        """The special token that closes an assistant's turn, None when the template closes it with text."""
        if self.template is None:
            return None
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        try:
            _, found, tail = self.template.render(turn).rpartition(MARK)
        except TemplateFailed:
            return None
        ids = self.tokenizer.encode(tail.lstrip()) if found else []
        return ids[0] if ids and ids[0] in self.tokenizer.special_ids else None

    def stop_ids(self, config_ids: Sequence[int]) -> frozenset[int]:
        """All tokens that end an answer: the model's, the tokenizer's and the template's."""
        return frozenset({*config_ids, self.tokenizer.eos_id, self.turn_end()} - {None})


class TextStream:
    """Text of ids that come one by one. Pieces are whole characters; control tokens show nothing.

    Decoders may join a token to the one before it, so a piece is the difference of two decoded texts.
    """

    def __init__(self, tokenizer: Tokenizer, strip: bool = False):
        self.tokenizer, self.strip = tokenizer, strip  # strip: the blank that `Prompts.chat` left out
        self.ids: list[int] = []
        self._begin = self._shown = 0  # ids[_begin:_shown] are shown, and decoded again for what they join

    def push(self, token: int) -> str:
        """The text that this token completes, "" while a character lacks bytes."""
        self.ids.append(token)
        return self._next(flush=False)

    def finish(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._next(flush=True)

    def _next(self, flush: bool) -> str:
        before = self._decode(self.ids[self._begin : self._shown])
        text = self._decode(self.ids[self._begin :])
        if len(text) <= len(before) or (text.endswith(CUT) and not flush):
            return ""
        piece = text[len(before) :]
        self._begin, self._shown = self._shown, len(self.ids)
        if self.strip:
            self.strip, piece = False, piece.removeprefix(" ")
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=True)
