"""Encoding one record to token ids and labels: parse, apply the chat template, mask the loss, limit the length."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tokenizers import Encoding

from lorawgpu.chat.hidden import hidden_kinds
from lorawgpu.chat.loss_mask import EndOfTurn, TurnLayout, render_with_spans
from lorawgpu.chat.prompt_check import differs, follows_prompt
from lorawgpu.chat.spans import Span, answer_tokens, overlapping, spaces_before, special_token_end
from lorawgpu.chat.template import ChatTemplate, TemplateFailed
from lorawgpu.data.bad_line import SourceLine, bad_line
from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.formats import Chat, Example, Text, Tokens, to_example
from lorawgpu.data.read_files import Raw, parse
from lorawgpu.data.renaming import Renaming
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer


class NeedsTokenizer(UserError):
    """The data is text and there is no tokenizer; the caller knows why."""


@dataclass(frozen=True)
class EncodeSettings:
    """The config keys that affect ids and labels, under their own names."""

    sequence_len: int
    excess_length_strategy: str  # truncate, drop or raise
    train_on_inputs: bool
    roles_to_train: tuple[str, ...]
    train_on_eos: str = "turn"  # or all, last, none: which ends of turns carry loss


@dataclass(frozen=True)
class Encoded:
    """A sample (None: too long and dropped) and what happened to it. For the others see `Counts`; `hidden`: of
    `chat.hidden.KINDS`."""

    sample: Sample | None
    truncated: bool = False
    missing_eos: bool = False
    empty_targets: bool = False
    boundary_tokens: int = 0
    hidden: frozenset[str] = frozenset()
    other_prompt: bool = False


class Encoder:
    """Turns records of one type into samples. It pickles, so that each worker process can have one.

    `vocab_size`: bound of pre-tokenized ids, None if the model is unknown; `first`: the record that the type was
    detected from, None if it was declared; `renaming`: for records with other keys. NeedsTokenizer if the type needs a
    tokenizer and there is none.
    """

    def __init__(
        self,
        kind: str,
        settings: EncodeSettings,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vocab_size: int | None = None,
        first: SourceLine | None = None,
        renaming: Renaming | None = None,
    ):
        if tokenizer is None and kind != "pretokenized":
            raise NeedsTokenizer(f"data of type {kind} needs the model's tokenizer, but there is none")
        self.kind, self.settings, self.tokenizer, self.template = kind, settings, tokenizer, template
        self.vocab_size, self.first, self.renaming = vocab_size, first, renaming
        self.special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self.turn_ends = None if template is None else EndOfTurn(template)
        self.differs = template is not None and differs(template)
        self.layouts: dict[tuple, TurnLayout | None] = {}  # cache of `render_with_spans`

    def __call__(self, file: str, line: int, raw: Raw) -> Encoded:
        """Encode a raw record. BadLine, naming file and line, if it is malformed or has no target token."""
        source = (file, line)
        record = parse(file, line, raw)
        if self.renaming:
            record = self.renaming.apply(record, self.kind, source)
        example = to_example(self.kind, record, source, self.first)
        encoded = {Tokens: self._tokens, Text: self._text, Chat: self._chat}[type(example)](example, source)
        if not encoded.sample.targets:
            raise bad_line(*source, _no_targets(example, len(encoded.sample), self.settings))
        return self._fit(encoded, source)

    def _tokens(self, example: Tokens, source: SourceLine) -> Encoded:
        top = max([*example.input_ids, *example.labels], default=0)
        if self.vocab_size is not None and top >= self.vocab_size:
            raise bad_line(*source, f"token id {top} is outside the model's vocabulary of {self.vocab_size}")
        return Encoded(Sample(np.array(example.input_ids, np.int32), np.array(example.labels, np.int32)))

    def _text(self, example: Text, source: SourceLine) -> Encoded:
        """Tokenize the joined pieces, as at inference: a token that spans two pieces is trained if either one is."""
        spans: dict[bool, list] = {True: [], False: []}
        text = ""
        empty = not any(piece.strip() for piece, trained in example.pieces if trained)
        for piece, trained in example.pieces:
            spans[trained or self.settings.train_on_inputs].append((len(text), len(text) + len(piece)))
            text += piece
        encoding = self._encode(text, source, add_special=example.whole)
        ids = np.array(encoding.ids, np.int32)
        if not spans[False]:  # no offsets needed, and getting them from the library is slow
            labels = np.where(np.array(encoding.special_tokens_mask, bool), IGNORE, ids).astype(np.int32)
            sample = Sample(*(self._with_eos(ids, labels, source) if example.whole else (ids, labels)))
            return Encoded(sample, empty_targets=empty)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        inside = overlapping(offsets, spans[True])
        boundary_tokens = int(np.count_nonzero(inside & overlapping(offsets, spans[False])))
        labels = np.where(inside, ids, IGNORE).astype(np.int32)
        ids, labels = self._with_eos(ids, labels, source) if example.whole else (ids, labels)
        return Encoded(Sample(ids, labels), empty_targets=empty, boundary_tokens=boundary_tokens)

    def _with_eos(self, ids: np.ndarray, labels: np.ndarray, source: SourceLine) -> tuple[np.ndarray, np.ndarray]:
        """Make it a document: drop a BOS that the text spells out again, and end with exactly one trained EOS."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise UserError(f"{self.tokenizer.source}: no EOS token, so a document cannot be ended; set eos_token")
        try:
            self.tokenizer.check_rows([eos])
        except UserError as error:
            raise bad_line(*source, str(error)) from None
        first = self.tokenizer.second_bos(ids)
        ids, labels = ids[first:], labels[first:]
        if not len(ids) or ids[-1] != eos:
            ids, labels = np.append(ids, np.int32(eos)), np.append(labels, np.int32(eos))
        labels[-1] = eos
        return ids, labels

    def _chat(self, chat: Chat, source: SourceLine) -> Encoded:
        if self.template is None:
            raise UserError(
                f"{source[0]}: the data is conversations, but the model has no chat template; name one, such as "
                "chatml, or a Jinja file: `chat_template` or `chat_template_jinja` in a config, --chat-template on a "
                "command line"
            )
        everything, roles = self.settings.train_on_inputs, self.settings.roles_to_train
        if everything:  # all tokens except those of turns with `train: false`
            chosen = [i for i, flag in enumerate(chat.train) if flag is False]
        else:
            by_role = [i >= chat.prompt and m["role"] in roles for i, m in enumerate(chat.messages)]
            chosen = [i for i, flag in enumerate(chat.train) if (by_role[i] if flag is None else flag)]
        try:
            text, spans = render_with_spans(self.template, chat.messages, chat.tools, chosen, self.layouts)
            encoding = self._encode(text, source)
            ids = encoding.ids
            special = partial(special_token_end, encoding, ids, self.special_ids)
            find = partial(self.turn_ends.find, chat.messages, chat.tools, text=text, special=special)
            ends = [find(i, span) for i, span in zip(chosen, spans, strict=True)]
            closed = ends[-1] if ends else 0
            other_ends = self._ends_of_other_turns(chat, chosen, find)
            if not everything:
                ends = self._trained_ends(chat, chosen, spans, ends)
        except TemplateFailed as error:
            raise bad_line(*source, str(error)) from None
        turns = [answer_tokens(encoding, ids, self.special_ids, (span[0], end))
                 for span, end in zip(spans, ends, strict=True)]  # fmt: skip
        ids = np.array(ids, np.int32)
        if everything:
            labels = ids.copy()
            for first, last in turns:
                labels[first:last] = IGNORE
        else:
            labels = np.full(len(ids), IGNORE, np.int32)
            turns += [spaces_before(text, encoding, span[0]) for span in spans]
            turns += [answer_tokens(encoding, ids, self.special_ids, end) for end in other_ends]
            for first, last in turns:
                labels[first:last] = ids[first:last]
        missing_eos = not everything and bool(chosen) and closed == spans[-1][1]
        empty = not everything and any(not text[start:end].strip() for start, end in spans)
        hidden = hidden_kinds(self.template, chat.messages, chat.tools, text) | ({"tools"} if chat.functions else set())
        answered = self.differs and chat.messages[-1]["role"] == "assistant" and len(chat.messages) - 1 in chosen
        other = answered and not follows_prompt(self.template, chat.messages, chat.tools, text, spans[-1][0])
        return Encoded(Sample(ids, labels), False, missing_eos, empty, hidden=hidden, other_prompt=other)

    def _trained_ends(self, chat: Chat, chosen: list[int], spans: list[Span], ends: list[int]) -> list[int]:
        """The ends of the chosen turns, without what closes a turn where `train_on_eos` leaves it out."""
        kept = {"none": [], "last": [len(chat.messages) - 1]}.get(self.settings.train_on_eos, chosen)
        return [end if i in kept else span[1] for i, span, end in zip(chosen, spans, ends, strict=True)]

    def _ends_of_other_turns(self, chat: Chat, chosen: list[int], find: Callable[[int, Span], int]) -> list[Span]:
        """What closes turns that are not chosen, for `train_on_eos: all`, or `last` of the last turn."""
        which = {"all": range(len(chat.messages)), "last": [len(chat.messages) - 1]}.get(self.settings.train_on_eos, [])
        others = [i for i in which if i not in chosen]
        if not others or self.settings.train_on_inputs:
            return []
        _, spans = render_with_spans(self.template, chat.messages, chat.tools, others, self.layouts)
        found = [(span[1], find(i, span)) for i, span in zip(others, spans, strict=True)]
        return [span for span in found if span[1] > span[0]]

    def _encode(self, text: str, source: SourceLine, add_special: bool = False) -> Encoding:
        try:
            return self.tokenizer.encoding(text, add_special=add_special)
        except UserError as error:
            raise bad_line(*source, str(error)) from None

    def _fit(self, encoded: Encoded, source: SourceLine) -> Encoded:
        sample, limit, strategy = encoded.sample, self.settings.sequence_len, self.settings.excess_length_strategy
        if len(sample) <= limit:
            return encoded
        if strategy == "raise":
            raise UserError(
                f"{source[0]}, line {source[1]}: {len(sample)} tokens, more than sequence_len {limit}; raise it, "
                "or set excess_length_strategy to truncate or drop"
            )
        cut = Sample(sample.input_ids[:limit], sample.labels[:limit])
        if strategy == "drop" or not cut.targets:  # nothing to train on is left
            return Encoded(None)
        return replace(encoded, sample=cut, truncated=True)


def _no_targets(example: Example, tokens: int, settings: EncodeSettings) -> str:
    if isinstance(example, Chat):
        roles = ", ".join(m["role"] for m in example.messages)
        trained = ", ".join(settings.roles_to_train)
        return f"this conversation has no target tokens: its roles are {roles}, roles_to_train is {trained}"
    return f"this record has no target tokens: none of its {tokens} tokens after the first has a label"
