"""What will be trained, shown token by token before anything heavy is loaded."""

import json
from collections.abc import Iterator, Sequence

import numpy as np

from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.token_store import Counts, TokenStore
from lorawgpu.tokenizer.hf import Tokenizer

GREEN, RESET = "\x1b[30;42m", "\x1b[0m"
OPEN, CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)  # marks where there is no colour


def preview_lines(
    stores: Sequence[TokenStore], tokenizer: Tokenizer | None, count: int, as_json: bool, colour: bool
) -> Iterator[str]:
    """Lines to print for the first `count` samples in file order, then the counts of all.

    As JSON: `{"line", "input_ids", "labels", "text"}` a sample, then one line of counts. As text: trained tokens on
    green, or in brackets without `colour`.
    """
    for store, index in _first(stores, count):
        sample, (file, line) = store[index], store.place(index)
        ids, labels = sample.input_ids.tolist(), sample.labels.tolist()
        if as_json:
            text = None if tokenizer is None else tokenizer.decode(ids)
            yield json.dumps({"line": line, "input_ids": ids, "labels": labels, "text": text}, ensure_ascii=False)
        else:
            yield f"{file}, line {line}: {len(sample)} tokens, {sample.targets} trained"
            yield marked(sample, tokenizer, colour) + "\n"
    counts = sum((store.counts for store in stores), Counts())
    yield json.dumps(counts.as_dict()) if as_json else summary(counts)
    if not as_json:
        yield from (f"  skipped: {line}" for store in stores for line in store.skipped)


def marked(sample: Sample, tokenizer: Tokenizer | None, colour: bool) -> str:
    """The text of a sample with its trained tokens marked; ids stand for text where there is no tokenizer."""
    opening, closing = (GREEN, RESET) if colour else (OPEN, CLOSE)
    trained = sample.labels != IGNORE
    trained[:1] = False  # the first token has nothing before it: it never carries loss
    borders = [*(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(sample)]
    out, start = "", 0
    shown = ""
    for end in borders:
        if tokenizer is None:
            piece = " ".join(str(i) for i in sample.input_ids[start:end]) + " "
        else:  # some decoders treat the first token of a text apart: so decode from the start each time
            whole = tokenizer.decode(sample.input_ids[:end].tolist())
            piece, shown = whole[len(shown) :], whole
        out += f"{opening}{piece}{closing}" if trained[start] else piece
        start = end
    return out


def summary(counts: Counts) -> str:
    """One line of counts; more where nothing would teach the model to stop, or tokens lie across a border."""
    line = (
        f"{counts.samples} samples, {counts.tokens} tokens, {counts.trained_tokens} trained, "
        f"{counts.truncated} truncated, {counts.dropped} dropped, {counts.skipped} bad lines skipped"
    )
    if counts.dropped:
        line += (
            f"\nnote: {counts.dropped} samples are left out: they, or what is trained of them, lie beyond "
            "sequence_len. Raise it, or set excess_length_strategy: truncate"
        )
    if counts.endless:
        line += (
            f"\nwarning: in {counts.endless} samples the chat template puts no end mark after the answer: "
            "the model will not learn to stop"
        )
    if counts.empty:
        line += (
            f"\nwarning: in {counts.empty} samples a trained answer is empty: the model would learn to say "
            "nothing. Either the data have none there, or the chat template does not show it (`tool_calls`, say)"
        )
    if counts.shared:
        line += (
            f"\nnote: {counts.shared} tokens hold the end of an untrained piece of text and the start of a trained, "
            "or the reverse: they are trained. A blank mostly belongs to the word after it: begin that piece with it"
        )
    return line


def _first(stores: Sequence[TokenStore], count: int) -> Iterator[tuple[TokenStore, int]]:
    for store in stores:
        for index in range(min(count, len(store))):
            yield store, index
        count -= min(count, len(store))
