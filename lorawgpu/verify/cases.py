"""Golden cases: results of an independent autograd. compare.py compares ours with them.

A case directory holds `config.json` and `model.safetensors`, or `model.gguf` (or needs a model from elsewhere),
`adapter_init/`, `batch.npz`, `case.json` and `expected.npz`; tests/golden/README.md describes them. Any array of
`expected.npz` may be absent and is then not compared. Nothing here needs a GPU: run.py computes the results.
"""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import Sample
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief, read_json_object
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.options import ModelOptions

PARTS = ("case.json", "batch.npz", "expected.npz", "adapter_init")  # files that only a case has
OWN_GGUF = "model.gguf"
STEPS = 3  # optimizer steps of a case
TOLERANCE = 1e-4  # or DRIFTS times the drift of the independent float32 run from float64, if larger
DRIFTS = 5
MAX_EXPANSION = 50  # maximum compression ratio of a case's arrays
FLIP_MARGIN = 3e-6  # float32 noise: an int8 rounding closer to a tie than this may flip
FLIP_TOLERANCE = 5e-2  # instead of TOLERANCE if roundings may flip: those of the independent run may, too


@dataclass(frozen=True)
class GoldenCase:
    """A case as read. `samples`: rows of the batch without padding; `mask`: bool [B, T], false for padding."""

    name: str
    checkpoint: Checkpoint
    lora: LoraConfig
    tensors: dict  # the initial adapter, by PEFT name
    samples: list
    mask: np.ndarray
    settings: dict  # case.json
    expected: dict  # expected.npz

    def part(self, prefix: str) -> dict:
        """Expected arrays "<prefix>.<tensor>", by tensor."""
        prefix += "."
        return {k.removeprefix(prefix): v for k, v in self.expected.items() if k.startswith(prefix)}

    def has(self, *names: str) -> bool:
        """Whether any of these is expected; a name that ends with a dot stands for all "<name><tensor>"."""
        return any(k in names or k.split(".")[0] + "." in names for k in self.expected)

    def may_flip(self, phase: str) -> bool:
        """Whether a rounding in this phase ("loss", "steps" or "greedy") is so close to a tie that it may flip."""
        margin = (self.settings.get("rounding_margin") or {}).get(phase)
        return margin is not None and margin < FLIP_MARGIN

    def tolerance(self, quantity: str, phase: str) -> float:
        """The largest allowed error of `quantity`, a key of `float32_vs_float64`."""
        drift = (self.settings.get("float32_vs_float64") or {}).get(quantity) or 0.0
        return max(FLIP_TOLERANCE if self.may_flip(phase) else TOLERANCE, DRIFTS * drift)


@dataclass
class Result:
    """The results of a case, in the form of the expected arrays; None for those that are not."""

    loss: float | None = None
    logits: np.ndarray | None = None  # [tokens, V]: the rows where the mask is 1
    grads: dict | None = None
    step_losses: list | None = None
    grad_norms: list | None = None
    after3: dict | None = None
    greedy: np.ndarray | None = None  # [tokens, V]: the logits before each expected token
    base_greedy: np.ndarray | None = None


def choose_cases(paths: list[str]) -> tuple[list[Path], list[Path]]:
    """(cases, others): a glob over cases may also match other files and folders, which are skipped.

    A folder with any part of a case counts as one, and so does a path that does not exist: `read_case` reports what is
    missing. Raises UserError if there is no case at all.
    """
    cases, others = [], []
    for path in map(Path, paths):
        is_case = not path.exists() or any((path / part).exists() for part in PARTS)
        (cases if is_case else others).append(path)
    if not cases:
        raise UserError(f"{', '.join(map(str, others[:3]))}: wanted a golden case directory with a case.json")
    return cases, others


def read_case(folder: str | Path, model: str | None = None, options: ModelOptions | None = None) -> GoldenCase:
    """Read and check a case; `model` is for cases without a model of their own, `options` say what its files do not.

    Raises UserError, naming the file, if anything is missing, damaged or does not fit together.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; wanted a golden case directory with a case.json")
    settings = read_json_object(folder / "case.json")
    model = own_model(folder) or model
    if model is None:
        named = f"; case.json names {brief(settings['model'])}" if "model" in settings else ""
        raise UserError(f"{folder}: has no model (config.json or {OWN_GGUF}); pass one with --model{named}")
    checkpoint = open_checkpoint(model, options)
    lora, tensors = read_adapter(folder / "adapter_init", checkpoint.config)
    samples, mask = _read_batch(folder / "batch.npz", checkpoint.config.vocab_size)
    expected = _read_arrays(folder / "expected.npz")
    case = GoldenCase(folder.resolve().name, checkpoint, lora, tensors, samples, mask, settings, expected)
    _check_expected(folder / "expected.npz", case)
    if case.has("step_losses", "grad_norms", "after3.", "greedy") and not settings.get("adamw"):
        raise UserError(f"{folder}/case.json: adamw is missing; the optimizer steps in expected.npz need its settings")
    return case


def own_model(folder: Path) -> Path | None:
    """The model in a case directory: the directory itself, or its GGUF file."""
    if (folder / "config.json").exists():
        return folder
    return folder / OWN_GGUF if (folder / OWN_GGUF).exists() else None


def _read_arrays(path: Path) -> dict:
    try:
        _check_sizes(path)
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (*_UNREADABLE, OSError) as error:
        raise UserError(f"{path}: not a readable .npz of plain arrays: {error}") from None


_UNREADABLE = (ValueError, EOFError, KeyError, AttributeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def _check_sizes(path: Path) -> None:
    """Raises ValueError if an array's size does not match its shape, or if the file is a decompression bomb.

    NumPy allocates the whole array, as its header describes it, before reading.
    """
    with zipfile.ZipFile(path) as file:
        if sum(member.file_size for member in file.infolist()) > MAX_EXPANSION * path.stat().st_size + (16 << 20):
            raise ValueError(f"it expands more than {MAX_EXPANSION}-fold")
        for member in file.infolist():
            with file.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if version not in read:
                    raise ValueError(f"{brief(member.filename)} has version {version} of the .npy format")
                shape, _, dtype = read[version](stream)
                held = member.file_size - stream.tell()
                if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
                    raise ValueError(f"{brief(member.filename)} has {held} bytes, which do not match {dtype} {shape}")


def _read_batch(path: Path, vocab: int) -> tuple[list, np.ndarray]:
    """The rows as samples without their right padding, and the mask of their tokens."""
    arrays = _read_arrays(path)
    if missing := {"input_ids", "labels", "attention_mask"} - arrays.keys():
        raise UserError(f"{path}: {sorted(missing)[0]} is missing")
    ids, labels, mask = (arrays[name] for name in ("input_ids", "labels", "attention_mask"))
    if ids.ndim != 2 or not ids.shape == labels.shape == mask.shape:
        raise UserError(
            f"{path}: shapes {ids.shape}, {labels.shape}, {mask.shape}; wanted [B, T] for ids, labels, mask"
        )
    mask = mask.astype(bool)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise UserError(f"{path}: attention_mask has a 1 after a 0; wanted padding on the right only")
    real = ids[mask]
    if not np.issubdtype(ids.dtype, np.integer) or (real < 0).any() or (real >= vocab).any():
        raise UserError(f"{path}: input_ids contains ids outside the vocabulary of {vocab}")
    rows = [Sample(i[m].astype(np.int32), x[m].astype(np.int32)) for i, x, m in zip(ids, labels, mask, strict=True)]
    if not any(row.targets for row in rows):
        raise UserError(f"{path}: labels contain no target token")
    return rows, mask


def _check_expected(path: Path, case: GoldenCase):
    """Raises UserError if the expected arrays do not fit the model, adapter and batch, or there are none."""
    vocab = case.checkpoint.config.vocab_size
    shapes = {"loss": (), "logits": (*case.mask.shape, vocab), "step_losses": (STEPS,), "grad_norms": (STEPS,)}
    for prefix in ("grad", "after3", "grad_norm"):
        for name in case.part(prefix):
            if name not in case.tensors:
                raise UserError(f"{path}: {prefix}.{name}: the adapter has no such tensor")
            shapes[f"{prefix}.{name}"] = () if prefix == "grad_norm" else case.tensors[name].shape
    for kind in ("greedy", "base_greedy"):
        if kind in case.expected and f"{kind}_prompt" not in case.expected:
            raise UserError(f"{path}: {kind} without {kind}_prompt")
        for name in (kind, f"{kind}_prompt"):
            ids = case.expected.get(name, np.zeros(1, int))
            if ids.ndim != 1 or not ids.size or (ids < 0).any() or (ids >= vocab).any():
                raise UserError(f"{path}: {name} is not a list of token ids in a vocabulary of {vocab}")
        if kind in case.expected:
            shapes[f"{kind}_gap"] = case.expected[kind].shape
    for name, shape in shapes.items():
        if name in case.expected and case.expected[name].shape != shape:
            raise UserError(f"{path}: {name} has shape {case.expected[name].shape}; wanted {shape}")
    if not any(name in shapes for name in case.expected):
        raise UserError(f"{path}: contains nothing to check, only {sorted(case.expected)[:3]}")
