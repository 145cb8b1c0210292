"""A checkpoint with another tokenizer, and rows of embedding and head for the tokens that it adds."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, RUN_CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.lora.ends import MAX_TOKENS, check_token_indices, rows_in_shapes
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.weights.tensors import CHUNK_ELEMENTS, HEAD, Checkpoint, Dense, Ternary, narrow

SPREAD = 1e-9  # of the covariance of new rows, relative to that of the others: transformers'


class Extended(Checkpoint):
    """`base` with `rows` rows of embedding and head, and the tokenizer that needs them.

    As transformers' resize_token_embeddings, new rows are drawn from a normal distribution with the mean of the others
    and their covariance times SPREAD. They depend on the number of the row alone. A matrix in blocks becomes float32.
    """

    def __init__(self, base: Checkpoint, rows: int, tokenizer: GuardedTokenizer | None) -> None:
        self.base, self.own_tokenizer, self._kept = base, tokenizer or base.own_tokenizer, {}
        self.config = replace(base.config, vocab_size=rows)
        self.path, self.name, self.quantized, self.in_4bit = base.path, base.name, base.quantized, base.in_4bit
        self.norm_offset, self.options, self.has_i2_s = base.norm_offset, base.options, base.has_i2_s
        self._ends = {self.embedding_name, HEAD} if rows > base.config.vocab_size else set()

    @property
    def stored_as(self) -> Checkpoint:
        return self.base.stored_as

    def readings(self) -> dict[str, Checkpoint]:
        rows = self.config.vocab_size
        return {name: Extended(reading, rows, self.own_tokenizer) for name, reading in self.base.readings().items()}

    def settings(self) -> bytes:
        return self.base.settings() + f"{self.config.vocab_size} rows".encode()

    def widened(self) -> dict[str, list[str]]:
        return self.base.widened()

    def dense(self, name: str) -> Dense:
        if name not in self._ends:
            return self.base.dense(name)
        if name not in self._kept:
            self._kept = {name: self._resized(self.base.dense(name))}  # one at a time: they are large
        return self._kept[name]

    def _resized(self, stored: Dense) -> Dense:
        new = new_rows(stored, self.config.vocab_size - len(stored.data))
        return Dense(np.concatenate([stored.data, new]), stored.dtype)

    def gather(self, name: str, ids: np.ndarray) -> Dense:
        if name not in self._ends:
            return self.base.gather(name, ids)
        stored = self.dense(name)
        return Dense(stored.data[ids], stored.dtype)

    def matrix(self, name: str):
        return self.dense(name) if name in self._ends else self.base.matrix(name)

    def store(self, name: str) -> str:
        if name not in self._ends:
            return self.base.store(name)
        own = self.base.store(name)
        return own if own in ("f32", "bf16", "f16") else "f32"

    def ternary(self, name: str) -> Ternary:
        return self.base.ternary(name)

    def tokenizer(self) -> GuardedTokenizer:
        return self.own_tokenizer or self.base.tokenizer()


def new_rows(stored: Dense, count: int) -> np.ndarray:
    """`count` rows after those of `stored`, in its dtype. mean + sqrt(SPREAD / V) g (W - mean) with g ~ N(0, 1) [V] has
    the covariance of W times SPREAD."""
    rows, width = stored.data.shape
    seeds = [np.random.Generator(np.random.Philox(key=[rows + i, 0])) for i in range(count)]
    total, mixed, drawn = np.zeros(width), np.zeros((count, width)), np.zeros(count)
    for at in range(0, rows, step := max(1, CHUNK_ELEMENTS // width)):
        part = Dense(stored.data[at : at + step], stored.dtype).float32().astype(np.float64)
        g = np.array([random.standard_normal(len(part)) for random in seeds]).reshape(count, len(part))
        total, mixed, drawn = total + part.sum(0), mixed + g @ part, drawn + g.sum(1)
    mean = total / rows
    return narrow(mean + math.sqrt(SPREAD / rows) * (mixed - drawn[:, None] * mean), stored.dtype).data


def extended_for(checkpoint: Checkpoint, adapter: str | Path | None) -> Checkpoint:
    """The checkpoint with the tokenizer in an adapter's folder, or that of its run, and the rows that its tensors have.

    UserError if there are more new rows than an adapter may add.
    """
    if adapter is None:
        return checkpoint
    rows, own = rows_of_adapter(Path(adapter)), checkpoint.config.vocab_size
    if rows > own + MAX_TOKENS:
        raise UserError(
            f"{adapter}: has {rows:,} rows of the embedding, this base model {own:,}: it is for another model"
        )
    folder = folder_of_tokenizer(Path(adapter))
    tokenizer = GuardedTokenizer.from_hf_folder(folder, max(rows, own)) if folder else None
    return Extended(checkpoint, max(rows, own), tokenizer) if rows > own or tokenizer else checkpoint


def folder_of_tokenizer(adapter: Path) -> Path | None:
    """Where an adapter's tokenizer is: in its folder, or, of a checkpoint, in that of the run. None if it has none."""
    found = adapter, *([adapter.parent] if (adapter.parent / RUN_CONFIG_FILE).is_file() else [])
    return next((folder for folder in found if (folder / TOKENIZER_FILE).is_file()), None)


def rows_of_adapter(adapter: Path) -> int:
    """Rows of embedding and head that the tensors and trained tokens of an adapter need; 0 if it has none of them.

    Anything that is wrong with its files is left to `read_adapter` to tell.
    """
    try:
        shapes = {name: entry.shape for name, entry in SafetensorsFile(adapter / WEIGHTS_FILE).entries.items()}
        tokens = check_token_indices(read_json_object(adapter / ADAPTER_CONFIG_FILE).get("trainable_token_indices"))
    except (UserError, ValueError, OSError):
        return 0
    return max(rows_in_shapes(shapes), *(max(ids) + 1 for ids in tokens.values()), 0)
