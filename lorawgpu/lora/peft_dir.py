"""The tensors of a LoRA adapter: names, shapes, initialization, and reading and writing PEFT directories.

A module has two tensors, under PEFT's keys: "base_model.model." + module + ".lora_A.weight" [r, in] and
".lora_B.weight" [out, r]. Embedding and head may have others (lora/ends.py).
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.numpy

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.hf import MULTIMODAL_PREFIX
from lorawgpu.families.modules import ENDS, HEAD
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import brief
from lorawgpu.lora.ends import check_token_indices, end_paths, end_shapes, lora_names
from lorawgpu.lora.peft_config import LoraConfig, lora_config_json, matches, read_lora_config

GGUF_HINT = "that is a GGUF adapter for llama.cpp; use the PEFT folder it was exported from"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?:[AB]\.weight|(?<=embed_tokens\.lora_)embedding_[AB])")
_END_KEY = re.compile(
    r"base_model\.model\.(?:.+\.)?(?:embed_tokens|lm_head)\.(?:weight|token_adapter\.trainable_tokens_delta)"
)
# What PEFT saves of the base model next to LoRA on an embedding or a head, or after a change of the vocabulary.
_BASE_KEY = re.compile(r"base_model\.model\.(?:.+\.)?(?:embed_tokens|lm_head)\.(?:token_adapter\.)?base_layer\.weight")
tensor_names = lora_names


def adapter_shapes(lora: LoraConfig, model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shape of every adapter tensor, layer by layer in forward order: A [r, in], then B [out, r]; then those of
    embedding and head.

    UserError for a target that matches no linear layer of this model, or if an end is trained in a way it cannot be.
    """
    linear_layers, ends = model.linear_shapes(), list(end_paths(model).values())
    if isinstance(lora.target_modules, str) and not any(map(lora.targets, [*linear_layers, *ends])):
        raise UserError(
            f"lora_target_modules: the pattern {brief(lora.target_modules)} matches no linear layer of this model; it "
            f"has to match whole paths, such as {next(iter(linear_layers))}"
        )
    for target in () if isinstance(lora.target_modules, str) else lora.target_modules:
        if not any(matches(target, module) for module in (*linear_layers, *ends)):
            raise UserError(
                f"lora_target_modules: {target!r} matches no linear layer of this model; wanted one of "
                f"{', '.join(model.all_linear())}, or a path like layers.0.self_attn.q_proj "
                f"({model.num_hidden_layers} layers)"
            )
    shapes = {}
    for module, (rows, columns) in linear_layers.items():
        if lora.targets(module):
            a, b = tensor_names(module)
            shapes[a], shapes[b] = (lora.rank(module), columns), (rows, lora.rank(module))
    shapes |= end_shapes(lora, model)
    if not shapes:
        raise UserError("lora_target_modules is empty: nothing to train; wanted module names or all-linear")
    return shapes


def init_adapter(
    lora: LoraConfig, model: ModelConfig, seed: int, base: Callable[..., np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """A new adapter, float32: A ~ U(-1/sqrt(in), 1/sqrt(in)), which is PEFT's kaiming_uniform(a=sqrt(5)), and B = 0.

    LoRA on the embedding has A = 0 and B ~ N(0, 1) instead. What is trained of embedding and head without LoRA begins
    with the model's own values: base(EMBEDDING or HEAD, ids, or None for all rows). Each random tensor has its own
    Philox stream, keyed by (seed, tensor name): adding a target does not change the others.
    """
    tensors = {}
    for name, shape in adapter_shapes(lora, model).items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        random = np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], "<u8")))
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])
            tensors[name] = random.uniform(-bound, bound, shape).astype(np.float32)
        elif name.endswith("lora_embedding_B"):
            tensors[name] = random.standard_normal(shape).astype(np.float32)
        elif _END_KEY.fullmatch(name):
            end = next(end for end in ENDS if f".{end}." in name)
            whole = end in lora.modules_to_save
            tensors[name] = base(end, None if whole else np.array(lora.trainable_token_indices[end]))
        else:
            tensors[name] = np.zeros(shape, np.float32)
    return tensors


def idle_adapter(lora: LoraConfig, model: ModelConfig, base: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    """The adapter with which the model computes what it does without one. base: as for `init_adapter`."""
    start = init_adapter(lora, model, 0, base)
    return {name: tensor if _END_KEY.fullmatch(name) else np.zeros_like(tensor) for name, tensor in start.items()}


def write_adapter(folder: str | Path, lora: LoraConfig, tensors: dict[str, np.ndarray], base_model_name: str) -> None:
    """Write a PEFT directory in float32, each file atomically.

    CheckFailed, before anything is written, if a tensor has a non-finite value; OSError if writing fails.
    """
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise CheckFailed(f"{folder}: not saved: {name} has non-finite values")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    as_float32 = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    # transformers rejects files without this metadata
    replace_file(folder / WEIGHTS_FILE, safetensors.numpy.save(as_float32, metadata={"format": "pt"}))
    inner = [name for name in tensors if f".{HEAD}." not in name]
    multimodal = inner and all(name.startswith(f"base_model.model.{MULTIMODAL_PREFIX}") for name in inner)
    prefix = MULTIMODAL_PREFIX if multimodal else ""
    replace_file(folder / ADAPTER_CONFIG_FILE, lora_config_json(lora, base_model_name, prefix))


def read_adapter(folder: str | Path, model: ModelConfig | None = None) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read a PEFT directory. Tensors are widened to float32, in the order of `adapter_shapes` if `model` is given.

    UserError, naming the file and the key or tensor, for anything missing, damaged, non-finite or unsupported (DoRA,
    biases, ...), and for an adapter that does not fit `model`.
    """
    path = _weights_of(folder)
    folder = path.parent
    file = SafetensorsFile(path)
    modules = dict.fromkeys(match["module"] for name in file.entries if (match := _KEY.fullmatch(name)))
    lora = read_lora_config(folder / ADAPTER_CONFIG_FILE, list(modules))  # first: its errors are clearer
    tensors = _read_tensors(file)
    if model is not None:
        lora = _for_model(lora, list(modules), model)
        shapes = _checked_shapes(path, lora, tensors, model)
        tensors = {name: tensors[name] for name in shapes}
    return lora, tensors


def _for_model(lora: LoraConfig, modules: list[str], model: ModelConfig) -> LoraConfig:
    """The config without names of layers that neither model nor adapter has, which PEFT's lists may contain.

    A pattern was read as the paths of all `modules`; they become plain names if these select the same modules.
    """
    linear = [*model.linear_shapes(), *end_paths(model).values()]
    known = tuple(t for t in lora.target_modules if any(matches(t, module) for module in (*linear, *modules)))
    lora = replace(lora, target_modules=known or lora.target_modules)
    if set(modules) != set(lora.target_modules):
        return lora
    names = tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in linear if module in modules))
    short = replace(lora, target_modules=names)
    return short if set(filter(short.targets, linear)) == set(modules) else lora


def _weights_of(folder: str | Path) -> Path:
    """The weights file of a PEFT directory. UserError, saying what the folder seems to be instead, if there is none."""
    name, folder = str(folder), Path(folder)
    if not name:
        raise UserError(f"the adapter's name is empty; wanted a PEFT adapter directory, with {ADAPTER_CONFIG_FILE}")
    if folder.suffix == ".gguf" and folder.is_file():
        raise UserError(f"{folder}: {GGUF_HINT}")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; wanted a PEFT adapter directory, with {ADAPTER_CONFIG_FILE}")
    if (folder / WEIGHTS_FILE).exists():
        return folder / WEIGHTS_FILE
    if (folder / "adapter_model.bin").exists():
        raise UserError(f"{folder}: adapter_model.bin is a pickle, which can run code; save it as {WEIGHTS_FILE}")
    raise UserError(f"{folder}: {_describe(folder)}")


def _describe(folder: Path) -> str:
    """What a folder without adapter weights seems to be."""
    if (folder / "adapters.safetensors").exists():
        return "that is an mlx-lm adapter; use the PEFT folder it was exported from"
    if any(folder.glob("*.gguf")):
        return GGUF_HINT
    if (folder / "config.json").exists():
        return f"that is a model, not an adapter; wanted a folder with {WEIGHTS_FILE}"
    if saved := sorted(folder.glob(f"checkpoint-*/{WEIGHTS_FILE}"), key=lambda path: path.stat().st_mtime):
        return f"that is an unfinished run, without a final adapter; its newest checkpoint is {saved[-1].parent}"
    return f"no {WEIGHTS_FILE}; wanted a PEFT adapter directory"


def _read_tensors(file: SafetensorsFile) -> dict[str, np.ndarray]:
    path, tensors = file.path, {}
    for name, entry in file.entries.items():
        if _BASE_KEY.fullmatch(name):
            continue
        if not _KEY.fullmatch(name) and not _END_KEY.fullmatch(name):
            raise UserError(f"{path}: {brief(name)} is not a LoRA tensor of a linear layer; not supported")
        if entry.dtype not in DENSE_TYPES or len(entry.shape) != 2:
            got = f"{entry.dtype} {list(entry.shape)}"
            raise UserError(f"{path}: {brief(name)} is {got}; wanted an F32, F16 or BF16 matrix")
        tensors[name] = widen(file.read(name), DENSE_TYPES[entry.dtype])
        if not np.isfinite(tensors[name]).all():
            raise UserError(f"{path}: {brief(name)} has non-finite values: its training diverged")
    if not tensors:
        raise UserError(f"{path}: contains no tensors")
    return tensors


def _checked_shapes(path: Path, lora: LoraConfig, tensors: dict[str, np.ndarray], model: ModelConfig):
    """`adapter_shapes`. UserError unless the tensors have exactly these names and shapes."""
    try:
        shapes = adapter_shapes(lora, model)
    except UserError as error:
        raise UserError(f"{path.with_name(ADAPTER_CONFIG_FILE)}: {error}") from None
    for name in tensors:
        if name not in shapes:
            raise UserError(
                f"{path}: {brief(name)} does not belong to a target module of this base model; is the adapter for "
                "another model?"
            )
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(
                f"{path}: {name} has shape {list(tensors[name].shape)}; wanted {list(shape)} for this base model and "
                f"the rank in {ADAPTER_CONFIG_FILE}"
            )
    if missing := [name for name in shapes if name not in tensors]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{path}: tensor {missing[0]}{more} is missing; the file is incomplete")
    return shapes


def start_adapter(
    config, model: ModelConfig, base: Callable[..., np.ndarray] | None = None
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """The adapter that a run (a TrainConfig) starts with: the one to continue from, or a new one.

    base: as for `init_adapter`. UserError if `config` sets a rank, alpha, rsLoRA, targets, modules or tokens to train
    other than those of the adapter to continue from.
    """
    chosen = config.lora_target_modules
    targets = model.all_linear() if chosen == "all-linear" else chosen if isinstance(chosen, str) else tuple(chosen)
    wanted = LoraConfig(
        config.lora_r,
        config.lora_alpha,
        targets,
        config.use_rslora,
        config.lora_dropout,
        modules_to_save=tuple(config.lora_modules_to_save),
        trainable_token_indices=check_token_indices(config.peft_trainable_token_indices),
    )
    if config.start_from is None:
        return wanted, init_adapter(wanted, model, config.seed, base)
    lora, tensors = read_adapter(config.start_from, model)
    same = {
        "lora_r": lora.r == wanted.r,
        "lora_alpha": lora.alpha == wanted.alpha,
        "use_rslora": lora.use_rslora == wanted.use_rslora,
        "lora_modules_to_save": lora.modules_to_save == wanted.modules_to_save,
        "peft_trainable_token_indices": lora.trainable_token_indices == wanted.trainable_token_indices,
    }
    ends = {"modules_to_save": lora.modules_to_save, "trainable_token_indices": lora.trainable_token_indices}
    chosen = adapter_shapes(replace(wanted, r=1, **ends), model)
    same["lora_target_modules"] = chosen.keys() == tensors.keys()
    for key, agrees in same.items():
        if key in config.model_fields_set and not agrees:
            raise UserError(
                f"{key} is {getattr(config, key)!r}, but the adapter to continue from ({config.start_from}) differs; "
                f"remove {key} from the config"
            )
    return replace(lora, dropout=config.lora_dropout), tensors
