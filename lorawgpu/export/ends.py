"""Embedding and head of a merged model: the base's with what the adapter trains of them, all in float32."""

from dataclasses import replace

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import EMBEDDING, ENDS, HEAD
from lorawgpu.lora.ends import end_of, end_paths, lora_names, rows_name, saved_name

MERGED = {
    "llama.cpp": "--to gguf --merged",
    "mlx-lm": "--to merged, which mlx_lm.convert reads",
    "Ollama": "--to ollama --merged",
}


def trained_ends(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of an adapter that belong to embedding or head."""
    return {name: tensor for name, tensor in tensors.items() if any(f".{end}." in name for end in ENDS)}


def refuse_ends(source, runtime: str) -> None:
    """UserError for an adapter that `runtime` can only have merged, because its format has LoRA of layers alone."""
    if not source.ends:
        return
    lora, what = source.lora, []
    for end in ENDS:
        if end in lora.modules_to_save:
            what.append(f"all of {end}")
        elif end in lora.trainable_token_indices:
            what.append(f"{len(lora.trainable_token_indices[end])} rows of {end}")
        elif any(name.split(".lora_")[0].endswith(f".{end}") for name in source.ends):
            what.append(f"LoRA on {end}")
    raise UserError(
        f"the adapter trains {' and '.join(what)}, which an adapter for {runtime} cannot hold: write the merged model "
        f"instead ({MERGED[runtime]}), or the PEFT folder (--to peft)"
    )


def is_changed_end(module: str, source) -> bool:
    """Whether a module is an embedding or head whose values or rows differ from the base's."""
    end = end_of(module)
    if end is None or module not in end_paths(source.config).values():
        return False
    grown = source.config.vocab_size > source.base.config.vocab_size
    own = any(f".{end}." in name for name in source.ends)
    return grown or own or _shares_rows(source)


def _shares_rows(source) -> bool:
    return source.config.tie_word_embeddings and EMBEDDING in source.lora.trainable_token_indices


def unties(source) -> bool:
    """Whether embedding and head of a tied model are two matrices in the merged one."""
    return source.config.tie_word_embeddings and any(
        not name.endswith(".trainable_tokens_delta") for name in source.ends
    )


def merged_config(source) -> ModelConfig:
    """The config of the merged model."""
    return replace(source.config, tie_word_embeddings=False) if unties(source) else source.config


def end_values(source, end: str) -> np.ndarray:
    """The merged matrix of an end, float32 [V, C]. CheckFailed if a value is not finite."""
    module, lora, tensors = end_paths(source.config)[end], source.lora, source.ends
    if (name := saved_name(module)) in tensors:
        return tensors[name]
    values = source.checkpoint.rows(end)
    first = EMBEDDING if end == HEAD and _shares_rows(source) else end
    if (name := rows_name(end_paths(source.config)[first])) in tensors:
        values = values.copy()
        values[list(lora.trainable_token_indices[first])] = tensors[name]
    a, b = lora_names(module)
    if a in tensors:
        product = np.float32(lora.scale(module)) * tensors[b] @ tensors[a]
        values = values + (product.T if end == EMBEDDING else product)
    if not np.isfinite(values).all():
        raise CheckFailed(f"{module}: with the adapter merged, a value is not finite")
    return values
