"""`tokens` and `added_tokens_overrides` of a config: a tokenizer with them, and a model with rows for them."""

import sys

from lorawgpu.config.schema import TrainConfig
from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import EMBEDDING, HEAD
from lorawgpu.lora.ends import end_paths
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.weights.extended import Extended
from lorawgpu.weights.tensors import Checkpoint


def changes_tokenizer(config: TrainConfig) -> bool:
    return bool(config.tokens or config.added_tokens_overrides)


def with_tokens(config: TrainConfig, tokenizer: GuardedTokenizer, rows: int | None) -> GuardedTokenizer:
    """The tokenizer with the config's tokens. rows: of the model's embedding, which grows as it has to."""
    if not changes_tokenizer(config):
        return tokenizer
    overrides = {int(number): text for number, text in config.added_tokens_overrides.items()}
    return tokenizer.with_added(config.tokens, overrides, rows)


def extend(config: TrainConfig, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, int]]:
    """The checkpoint with the config's tokens, and the ids of those that are new to its tokenizer.

    UserError if it has no tokenizer, or cannot have these tokens.
    """
    if not changes_tokenizer(config):
        return checkpoint, {}
    before, rows = checkpoint.tokenizer(), checkpoint.config.vocab_size
    tokenizer = with_tokens(config, before, rows)
    new = {token: tokenizer.token_id(token) for token in config.tokens if before.token_id(token) is None}
    more = Extended(checkpoint, max(rows, *(i + 1 for i in new.values()), 0), tokenizer)
    _note_widened(checkpoint, more)
    return more, new


def _note_widened(checkpoint: Checkpoint, more: Extended) -> None:
    """Print a note on stderr for a table in blocks that becomes float32 because it grows."""
    stored, shape = checkpoint.store(checkpoint.embedding_name), (more.config.vocab_size, more.config.hidden_size)
    if more.store(more.embedding_name) != stored:
        size, added = 4 * shape[0] * shape[1] / 2**30, shape[0] - checkpoint.config.vocab_size
        print(
            f"note: {checkpoint.name}: embedding ({stored}) becomes float32, {size:.3g} GiB, to grow by {added} rows",
            file=sys.stderr,
        )


def check_trained(new: dict[str, int], lora: LoraConfig, model: ModelConfig) -> None:
    """UserError, with what to write, unless the rows of all new tokens are trained."""
    trained = lora.trainable_token_indices.get(EMBEDDING, ())
    if EMBEDDING in lora.modules_to_save or lora.targets(end_paths(model)[EMBEDDING]):
        return
    if idle := [token for token, number in new.items() if number not in trained]:
        ids = sorted({*trained, *new.values()})
        rows = ids if model.tie_word_embeddings else f"{{{EMBEDDING}: {ids}, {HEAD}: {ids}}}"
        ends = EMBEDDING if model.tie_word_embeddings else f"{EMBEDDING}, {HEAD}"
        raise UserError(
            f"tokens: {idle[0]!r} is new, with id {new[idle[0]]}, and nothing trains its row of the embedding: add "
            f"peft_trainable_token_indices: {rows}, or lora_modules_to_save: [{ends}]"
        )
