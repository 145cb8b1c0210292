"""A preview of the training data, token by token, without loading the model."""

import json
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.token_store import Counts, TokenStore
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.util.printable import message, printable

GREEN, RESET = "\x1b[30;42m", "\x1b[0m"
OPEN, CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)  # where the output has no color

HIDDEN = {
    "tools": "the tools or tool calls: the model would not learn them. Use a template that shows them "
    "(chat_template_jinja), and `tools` and `tool_calls` instead of `functions` and `function_call`",
    "reasoning": "the reasoning, or that of earlier turns: it is not trained",
    "messages": "every message, such as one of an unusual role: the model would not see it",
}


def preview_lines(
    stores: Sequence[TokenStore],
    tokenizer: GuardedTokenizer | None,
    count: int,
    as_json: bool,
    color: bool,
    truncates: bool = False,
) -> Iterator[str]:
    """Lines to print: the first `count` samples in file order, then the counts of all.

    As JSON: one `{"line", "input_ids", "labels", "text"}` per sample, then one line of counts. As text: target tokens
    on green, or in brackets if not `color`.
    """
    for store, index in _first(stores, count):
        sample, (file, line) = store[index], store.place(index)
        ids, labels = sample.input_ids.tolist(), sample.labels.tolist()
        if as_json:
            text = None if tokenizer is None else tokenizer.decode(ids)
            yield json.dumps({"line": line, "input_ids": ids, "labels": labels, "text": text}, ensure_ascii=False)
        else:
            yield f"{printable(file)}, line {line}: {len(sample)} tokens, {sample.targets} of them targets"
            yield marked(sample, tokenizer, color) + "\n"
    counts = sum((store.counts for store in stores), Counts())
    yield json.dumps(counts.as_dict()) if as_json else summary(counts, truncates)
    if not as_json:
        yield from (f"  skipped: {message(line)}" for store in stores for line in store.skipped)


def marked(sample: Sample, tokenizer: GuardedTokenizer | None, color: bool) -> str:
    """The text of a sample with its target tokens marked; token ids instead of text if there is no tokenizer."""
    opening, closing = (GREEN, RESET) if color else _brackets()
    is_target = sample.labels != IGNORE
    is_target[:1] = False  # nothing predicts the first token
    borders = [*(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(sample)]
    out, start = "", 0
    shown = ""
    for end in borders:
        if tokenizer is None:
            piece = " ".join(str(i) for i in sample.input_ids[start:end]) + " "
        else:  # decode from the start each time: some decoders treat the first token specially
            decoded = tokenizer.decode(sample.input_ids[:end].tolist())
            piece, shown = printable(decoded[len(shown) :]), decoded
        out += f"{opening}{piece}{closing}" if is_target[start] else piece
        start = end
    return out


def _brackets() -> tuple[str, str]:
    """Marks that the output can show: a console of Windows may know 256 characters."""
    try:
        (OPEN + CLOSE).encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "[[", "]]"
    return OPEN, CLOSE


def summary(counts: Counts, truncates: bool = False) -> str:
    """One line of counts, and a line of advice for each thing that looks wrong. `truncates`: excess_length_strategy is
    truncate already."""
    text = (
        f"{counts.samples} samples, {counts.tokens} tokens ({counts.trained_tokens} targets), "
        f"{counts.truncated} truncated, {counts.dropped} dropped, {counts.skipped} bad lines skipped"
    )
    if counts.dropped:
        text += (
            f"\nnote: {counts.dropped} samples dropped: all their target tokens are beyond sequence_len. Raise it"
            if truncates
            else f"\nnote: {counts.dropped} samples dropped: they, or all their target tokens, are beyond sequence_len."
            " Raise it, or set excess_length_strategy: truncate"
        )
    if counts.missing_eos:
        text += (
            f"\nwarning: in {counts.missing_eos} samples the chat template ends the answer without an end-of-turn "
            "token: the model will not learn to stop"
        )
    if counts.empty_targets:
        text += (
            f"\nwarning: in {counts.empty_targets} samples an answer to train on is empty: the model would learn to "
            "say nothing. Either the data has no answer, or the chat template does not show it (such as `tool_calls`)"
        )
    for kind, count in counts.hidden().items():
        text += f"\nwarning: in {count} samples the chat template does not show {HIDDEN[kind]}"
    if counts.boundary_tokens:
        text += (
            f"\nnote: {counts.boundary_tokens} tokens span a boundary between trained and untrained text; they are "
            "trained. A space usually belongs to the next word: move it to the start of the next piece"
        )
    return text


def _first(stores: Sequence[TokenStore], count: int) -> Iterator[tuple[TokenStore, int]]:
    for store in stores:
        for index in range(min(count, len(store))):
            yield store, index
        count -= min(count, len(store))
