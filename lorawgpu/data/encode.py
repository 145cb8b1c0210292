"""One record to token ids and labels: the file's form, the template, the mask, the length."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tokenizers import Encoding

from lorawgpu.chat.loss_mask import EndMarks, Frame, bodies
from lorawgpu.chat.spans import blanks_before, overlapping, special_at, tokens_of
from lorawgpu.chat.template import ChatTemplate, TemplateFailed
from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.formats import Chat, Example, Place, Text, Tokens, to_example
from lorawgpu.data.read_files import Raw, bad_line, parse
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer


class NeedsTokenizer(UserError):
    """The data are text and there is no tokenizer; the caller knows why."""


@dataclass(frozen=True)
class EncodeSettings:
    """What decides ids and labels besides data, tokenizer and template; the names are those of the config."""

    sequence_len: int
    excess_length_strategy: str  # truncate, drop or raise
    train_on_inputs: bool
    roles_to_train: tuple[str, ...]


@dataclass(frozen=True)
class Encoded:
    """A sample, or None when it is too long and dropped; and what was done to it."""

    sample: Sample | None
    truncated: bool = False
    endless: bool = False  # a chat whose last trained turn has no end mark: nothing teaches the model to stop
    empty: bool = (
        False  # a trained turn or piece without a character: a template that shows no tool calls, or no answer
    )
    shared: int = 0  # tokens that hold characters of a trained and of an untrained piece: they are trained


class Encoder:
    """Records of one type to samples. Pickles, so that worker processes can each have one.

    `vocab_size` bounds pre-tokenised ids where the model is known; `first`: the record whose keys told the type, where
    no one named it. UserError when the type needs a tokenizer or a template that is not there.
    """

    def __init__(
        self,
        kind: str,
        settings: EncodeSettings,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vocab_size: int | None = None,
        first: Place | None = None,
    ):
        if tokenizer is None and kind != "pretokenized":
            raise NeedsTokenizer(f"data of type {kind} needs the model's tokenizer, and there is none")
        self.kind, self.settings, self.tokenizer, self.template = kind, settings, tokenizer, template
        self.vocab_size, self.first = vocab_size, first
        self.special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self.marks = None if template is None else EndMarks(template)
        self.frames: dict[tuple, Frame | None] = {}  # see `bodies`

    def __call__(self, file: str, line: int, raw: Raw) -> Encoded:
        """Encode a raw record. BadLine naming file and line when it is malformed or trains nothing."""
        place = (file, line)
        example = to_example(self.kind, parse(file, line, raw), place, self.first)
        encoded = {Tokens: self._tokens, Text: self._text, Chat: self._chat}[type(example)](example, place)
        if not encoded.sample.targets:
            raise bad_line(*place, _nothing_trained(example, len(encoded.sample), self.settings))
        return self._fit(encoded, place)

    def _tokens(self, example: Tokens, place: Place) -> Encoded:
        top = max([*example.input_ids, *example.labels], default=0)
        if self.vocab_size is not None and top >= self.vocab_size:
            raise bad_line(*place, f"token id {top} is outside the model's vocabulary of {self.vocab_size}")
        return Encoded(Sample(np.array(example.input_ids, np.int32), np.array(example.labels, np.int32)))

    def _text(self, example: Text, place: Place) -> Encoded:
        """Tokenised as one text, as it will be met again: where a token holds the end of one piece and the start of
        the next, it is trained when one of the two is."""
        spans: dict[bool, list] = {True: [], False: []}
        text = ""
        empty = not any(piece.strip() for piece, trained in example.pieces if trained)
        for piece, trained in example.pieces:
            spans[trained or self.settings.train_on_inputs].append((len(text), len(text) + len(piece)))
            text += piece
        encoding = self._encode(text, place, add_special=example.whole)
        ids = np.array(encoding.ids, np.int32)
        if not spans[False]:  # then no offset is needed, and taking them out of the library costs much
            labels = np.where(np.array(encoding.special_tokens_mask, bool), IGNORE, ids).astype(np.int32)
            return Encoded(Sample(*(self._ended(ids, labels) if example.whole else (ids, labels))), empty=empty)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        inside = overlapping(offsets, spans[True])
        shared = int(np.count_nonzero(inside & overlapping(offsets, spans[False])))
        labels = np.where(inside, ids, IGNORE).astype(np.int32)
        ids, labels = self._ended(ids, labels) if example.whole else (ids, labels)
        return Encoded(Sample(ids, labels), empty=empty, shared=shared)

    def _ended(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A document: one BOS where the text spells out the one it gets, and a trained EOS at the end, once."""
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if eos is None:
            raise UserError(f"{self.tokenizer.source}: names no EOS token, so a text cannot be ended")
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            ids, labels = ids[1:], labels[1:]
        if not len(ids) or ids[-1] != eos:
            ids, labels = np.append(ids, np.int32(eos)), np.append(labels, np.int32(eos))
        labels[-1] = eos
        return ids, labels

    def _chat(self, chat: Chat, place: Place) -> Encoded:
        if self.template is None:
            raise UserError(
                f"{place[0]}: the data are conversations and the model has no chat template; name one, such as "
                "chatml, or give a Jinja file: `chat_template` and `chat_template_jinja` in a config, else "
                "--chat-template"
            )
        everything, roles = self.settings.train_on_inputs, self.settings.roles_to_train
        if everything:  # every token counts but the turns that say `train: false`
            wanted = [i for i, flag in enumerate(chat.train) if flag is False]
        else:
            by_role = [i >= chat.prompt and m["role"] in roles for i, m in enumerate(chat.messages)]
            wanted = [i for i, flag in enumerate(chat.train) if (by_role[i] if flag is None else flag)]
        try:
            text, found = bodies(self.template, chat.messages, chat.tools, wanted, self.frames)
            encoding = self._encode(text, place)
            ids = encoding.ids
            special = partial(special_at, encoding, ids, self.special_ids)
            ends = [self.marks.after(chat.messages, chat.tools, i, body, text, special)
                    for i, body in zip(wanted, found, strict=True)]  # fmt: skip
        except TemplateFailed as error:
            raise bad_line(*place, str(error)) from None
        turns = [tokens_of(encoding, (body[0], end)) for body, end in zip(found, ends, strict=True)]
        ids = np.array(ids, np.int32)
        if everything:
            labels = ids.copy()
            for first, last in turns:
                labels[first:last] = IGNORE
        else:
            labels = np.full(len(ids), IGNORE, np.int32)
            for first, last in turns + [blanks_before(text, encoding, body[0]) for body in found]:
                labels[first:last] = ids[first:last]
        endless = not everything and bool(wanted) and ends[-1] == found[-1][1]
        empty = not everything and any(not text[start:end].strip() for start, end in found)
        return Encoded(Sample(ids, labels), endless=endless, empty=empty)

    def _encode(self, text: str, place: Place, add_special: bool = False) -> Encoding:
        try:
            return self.tokenizer.encoding(text, add_special=add_special)
        except UserError as error:
            raise bad_line(*place, str(error)) from None

    def _fit(self, encoded: Encoded, place: Place) -> Encoded:
        sample, limit, strategy = encoded.sample, self.settings.sequence_len, self.settings.excess_length_strategy
        if len(sample) <= limit:
            return encoded
        if strategy == "raise":
            raise UserError(
                f"{place[0]}, line {place[1]}: {len(sample)} tokens, more than sequence_len {limit}; raise it, "
                "or set excess_length_strategy to truncate or drop"
            )
        cut = Sample(sample.input_ids[:limit], sample.labels[:limit])
        if strategy == "drop" or not cut.targets:  # cut so that nothing trained is left: as good as dropped
            return Encoded(None)
        return replace(encoded, sample=cut, truncated=True)


def _nothing_trained(example: Example, tokens: int, settings: EncodeSettings) -> str:
    if isinstance(example, Chat):
        roles = ", ".join(m["role"] for m in example.messages)
        wanted = ", ".join(settings.roles_to_train)
        return f"no token of this conversation would be trained: its roles are {roles}, trained are turns of {wanted}"
    return f"no token of this record would be trained: none of its {tokens} tokens after the first carries a label"
