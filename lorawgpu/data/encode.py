"""One record to token ids and labels: the file's form, the template, the mask, the length."""

from dataclasses import dataclass

import numpy as np

from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.chat import ChatTemplate, EndMarks, TemplateFailed, bodies, overlapping
from lorawgpu.data.files import Raw, bad_line, parse
from lorawgpu.data.formats import Chat, Example, Place, Text, Tokens, to_example
from lorawgpu.data.tokenizer import Tokenizer
from lorawgpu.errors import UserError

STRATEGIES = ("truncate", "drop", "raise")


@dataclass(frozen=True)
class EncodeSettings:
    """What decides ids and labels besides data, tokenizer and template; the names are those of the config."""

    sequence_len: int
    excess_length_strategy: str  # of STRATEGIES
    train_on_inputs: bool
    roles_to_train: tuple[str, ...]


@dataclass(frozen=True)
class Encoded:
    """A sample, or None when it is too long and dropped; and what was done to it."""

    sample: Sample | None
    truncated: bool = False
    endless: bool = False  # a chat whose last trained turn has no end mark: nothing teaches the model to stop


class Encoder:
    """Records of one type to samples. Pickles, so that worker processes can each have one.

    `vocab_size` bounds pre-tokenised ids where the model is known. UserError when the type needs a tokenizer or a
    template that is not there.
    """

    def __init__(
        self,
        kind: str,
        settings: EncodeSettings,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vocab_size: int | None = None,
    ):
        if tokenizer is None and kind != "pretokenized":
            raise UserError(f"data of type {kind} needs the model's tokenizer, and there is none")
        self.kind, self.settings, self.tokenizer, self.template = kind, settings, tokenizer, template
        self.vocab_size = vocab_size
        self.special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self.marks = None if template is None else EndMarks(template)

    def __call__(self, file: str, line: int, raw: Raw) -> Encoded:
        """Encode a raw record. BadLine naming file and line when it is malformed or trains nothing."""
        place = (file, line)
        example = to_example(self.kind, parse(file, line, raw), place)
        endless = False
        if isinstance(example, Tokens):
            ids, labels = self._tokens(example, place)
        elif isinstance(example, Text):
            ids, labels = self._text(example, place)
        else:
            ids, labels, endless = self._chat(example, place)
        sample = Sample(np.array(ids, np.int32), np.array(labels, np.int32))
        if not sample.targets:
            raise bad_line(*place, _nothing_trained(example, len(ids), self.settings))
        return self._fit(sample, endless, place)

    def _tokens(self, example: Tokens, place: Place) -> tuple[list[int], list[int]]:
        top = max([*example.input_ids, *example.labels], default=0)
        if self.vocab_size is not None and top >= self.vocab_size:
            raise bad_line(*place, f"token id {top} is outside the model's vocabulary of {self.vocab_size}")
        return example.input_ids, example.labels

    def _text(self, example: Text, place: Place) -> tuple[list[int], list[int]]:
        spans, text = [], ""
        for piece, trained in example.pieces:
            if trained or self.settings.train_on_inputs:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        ids, offsets = self._encode(text, place, add_special=example.whole)
        trained = overlapping(offsets, spans)
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if example.whole and len(ids) > 1 and ids[0] == ids[1] == bos:  # the text spells out the BOS it would get
            ids, trained = ids[1:], trained[1:]
        if example.whole and ids[-1:] != [eos]:
            if eos is None:
                raise UserError(f"{self.tokenizer.source}: names no EOS token, so a text cannot be ended")
            ids, trained = [*ids, eos], [*trained, True]
        elif example.whole:
            trained[-1] = True
        return ids, _labels(ids, trained)

    def _chat(self, chat: Chat, place: Place) -> tuple[list[int], list[int], bool]:
        if self.template is None:
            raise UserError(
                f"{place[0]}: the data are conversations and the model has no chat template; name one with "
                "`chat_template` (chatml, llama-3, ...) or give `chat_template_jinja`"
            )
        everything, roles = self.settings.train_on_inputs, self.settings.roles_to_train
        if everything:  # every token counts but the turns that say `train: false`
            wanted = [i for i, flag in enumerate(chat.train) if flag is False]
        else:
            by_role = [i >= chat.prompt and m["role"] in roles for i, m in enumerate(chat.messages)]
            wanted = [i for i, flag in enumerate(chat.train) if (by_role[i] if flag is None else flag)]
        try:
            text, found = bodies(self.template, chat.messages, chat.tools, wanted)
            ids, offsets = self._encode(text, place)
            special = {start: end for (start, end), i in zip(offsets, ids, strict=True) if i in self.special_ids}
            ends = [self.marks.after(chat.messages, chat.tools, i, body, text, special)
                    for i, body in zip(wanted, found, strict=True)]  # fmt: skip
        except TemplateFailed as error:
            raise bad_line(*place, str(error)) from None
        inside = overlapping(offsets, sorted((body[0], end) for body, end in zip(found, ends, strict=True)))
        trained = [not i for i in inside] if everything else inside
        endless = not everything and bool(wanted) and ends[-1] == found[-1][1]
        return ids, _labels(ids, trained), endless

    def _encode(self, text: str, place: Place, add_special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        try:
            return self.tokenizer.encode_with_offsets(text, add_special=add_special)
        except UserError as error:
            raise bad_line(*place, str(error)) from None

    def _fit(self, sample: Sample, endless: bool, place: Place) -> Encoded:
        limit, strategy = self.settings.sequence_len, self.settings.excess_length_strategy
        if len(sample) <= limit:
            return Encoded(sample, endless=endless)
        if strategy == "raise":
            raise UserError(
                f"{place[0]}, line {place[1]}: {len(sample)} tokens, more than sequence_len {limit}; raise it, "
                "or set excess_length_strategy to truncate or drop"
            )
        cut = Sample(sample.input_ids[:limit], sample.labels[:limit])
        if strategy == "drop" or not cut.targets:  # cut so that nothing trained is left: as good as dropped
            return Encoded(None)
        return Encoded(cut, truncated=True, endless=endless)


def _labels(ids: list[int], trained: list[bool]) -> list[int]:
    return [i if t else IGNORE for i, t in zip(ids, trained, strict=True)]


def _nothing_trained(example: Example, tokens: int, settings: EncodeSettings) -> str:
    if isinstance(example, Chat):
        roles = ", ".join(m["role"] for m in example.messages)
        wanted = ", ".join(settings.roles_to_train)
        return f"no token of this conversation would be trained: its roles are {roles}, trained are turns of {wanted}"
    return f"no token of this record would be trained: none of its {tokens} tokens after the first carries a label"
