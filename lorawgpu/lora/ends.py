"""What an adapter trains outside of the layers: rows or all of the embedding and the head, as PEFT does and names it.

A matrix of `modules_to_save` is trained whole and replaces the base's. Of `trainable_token_indices`, rows are: those
of a tied embedding are the head's too. LoRA on the embedding has its A as [r, V] in files.
"""

from collections.abc import Mapping

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import EMBEDDING, ENDS, HEAD
from lorawgpu.files.untrusted import brief

MAX_TOKENS = 1 << 14  # rows that are trained by their index: with more, the whole matrix is the better way


def end_paths(model: ModelConfig) -> dict[str, str]:
    """The module paths of embedding and head by their names."""
    return {EMBEDDING: f"{model.prefix}{EMBEDDING}", HEAD: HEAD}


def end_of(module: str) -> str | None:
    """EMBEDDING or HEAD if that is what a module path ends with, otherwise None."""
    name = module.rsplit(".", 1)[-1]
    return name if name in ENDS else None


def lora_names(module: str) -> tuple[str, str]:
    """PEFT's keys of the A and B of a module."""
    at = f"base_model.model.{module}"
    if end_of(module) == EMBEDDING:
        return f"{at}.lora_embedding_A", f"{at}.lora_embedding_B"
    return f"{at}.lora_A.weight", f"{at}.lora_B.weight"


def rows_name(module: str) -> str:
    """PEFT's key of the trained rows of a module."""
    return f"base_model.model.{module}.token_adapter.trainable_tokens_delta"


def saved_name(module: str) -> str:
    """PEFT's key of a matrix that is trained whole."""
    return f"base_model.model.{module}.weight"


def check_modules_to_save(names: object) -> tuple[str, ...]:
    """The modules to train whole, embedding first. ValueError for anything but a list of ENDS."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and end_of(name) for name in names):
        raise ValueError(f"wanted a list of {' and '.join(ENDS)}: no other module is trained whole")
    found = {end_of(name) for name in names}
    return tuple(name for name in ENDS if name in found)


def check_token_indices(indices: object) -> dict[str, tuple[int, ...]]:
    """The ids of the rows to train by module name; a list is the embedding's. ValueError for anything else."""
    table = indices if isinstance(indices, Mapping) else {EMBEDDING: indices} if indices else {}
    found = {}
    for module, ids in table.items():
        if not isinstance(module, str) or not (name := end_of(module)):
            raise ValueError(f"{brief(module)}: wanted {' or '.join(ENDS)}")
        if not isinstance(ids, list | tuple) or not all(type(i) is int and 0 <= i < 1 << 30 for i in ids):
            raise ValueError("wanted a list of token ids, or such lists by module")
        if len(set(ids)) < len(ids):
            raise ValueError(f"token {next(i for i in ids if list(ids).count(i) > 1)} is listed twice")
        if len(ids) > MAX_TOKENS:
            raise ValueError(f"{len(ids):,} ids; wanted at most {MAX_TOKENS:,}: train the whole matrix instead")
        if ids:
            found[name] = tuple(ids)
    return {name: found[name] for name in ENDS if name in found}


def check_ends(lora, model: ModelConfig) -> None:
    """UserError unless `lora` (a LoraConfig) trains each end in one way that this model has."""
    paths = end_paths(model)
    for name in ENDS:
        ways = {
            "lora_modules_to_save": name in lora.modules_to_save,
            "peft_trainable_token_indices": name in lora.trainable_token_indices,
            "lora_target_modules": lora.targets(paths[name]),
        }
        if len(twice := [key for key, value in ways.items() if value]) > 1:
            raise UserError(f"{name} is in {' and in '.join(twice)}: train it in one of these ways")
        if ids := [i for i in lora.trainable_token_indices.get(name, ()) if i >= model.vocab_size]:
            raise UserError(
                f"peft_trainable_token_indices: token {ids[0]} is outside of the {model.vocab_size:,} rows of {name}"
            )
    embedding = EMBEDDING in (*lora.modules_to_save, *lora.trainable_token_indices) or lora.targets(paths[EMBEDDING])
    if embedding and model.per_layer_input:
        raise UserError(
            f"{EMBEDDING} cannot be trained in this model: the per-layer inputs of Gemma 4 depend on it too, and their "
            f"gradient is not computed. {HEAD} and the linear layers can"
        )
    if model.tie_word_embeddings:
        _check_tied(lora, paths)


def _check_tied(lora, paths: Mapping[str, str]) -> None:
    """The head of a tied model has the trained rows of the embedding, and nothing else next to them."""
    rows = lora.trainable_token_indices
    if rows.get(HEAD) not in (None, rows.get(EMBEDDING)):
        raise UserError(f"peft_trainable_token_indices: {HEAD} is tied to {EMBEDDING}: give the ids for that alone")
    if rows and (HEAD in lora.modules_to_save or lora.targets(paths[HEAD])):
        raise UserError(
            f"peft_trainable_token_indices trains rows of {HEAD} too, which is tied to {EMBEDDING}: train {HEAD} in no "
            "other way"
        )


def end_shapes(lora, model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shapes of all tensors of the ends by PEFT's names: [r, V] and [C, r], or [r, C] and [V, r]; rows [n, C];
    whole matrices [V, C]. UserError as `check_ends`."""
    check_ends(lora, model)
    vocab, hidden, shapes = model.vocab_size, model.hidden_size, {}
    for name, module in end_paths(model).items():
        if lora.targets(module):
            (a, b), r = lora_names(module), lora.rank(module)
            shapes[a], shapes[b] = ((r, vocab), (hidden, r)) if name == EMBEDDING else ((r, hidden), (vocab, r))
        if (ids := rows_of(lora, model, name)) is not None:
            shapes[rows_name(module)] = (len(ids), hidden)
        if name in lora.modules_to_save:
            shapes[saved_name(module)] = (vocab, hidden)
    return shapes


def rows_of(lora, model: ModelConfig, name: str) -> tuple[int, ...] | None:
    """The ids of the rows of an end that have a tensor of their own; a tied head's are the embedding's."""
    if name == HEAD and model.tie_word_embeddings and EMBEDDING in lora.trainable_token_indices:
        return None
    return lora.trainable_token_indices.get(name)


def rows_in_shapes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of embedding and head that the tensors of an adapter have, by their shapes; 0 if there are none."""
    found = [0]
    for name, shape in shapes.items():
        if name.endswith((f".{EMBEDDING}.weight", f".{HEAD}.weight", f".{HEAD}.lora_B.weight")):
            found.append(shape[0])
        elif name.endswith(f".{EMBEDDING}.lora_embedding_A"):
            found.append(shape[-1])
    return max(found)
