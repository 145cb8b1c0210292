"""Golden cases: an outside autograd's answers. How results are compared with them: compare.py.

A case directory holds `config.json` and `model.safetensors` (or needs a model from elsewhere), `adapter_init/`,
`batch.npz`, `case.json` and `expected.npz`; tests/golden/README.md says what is in them. Any part of `expected.npz` may
be absent and is then not compared. Nothing here needs a GPU: `lorawgpu.verify` computes the results.
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

PARTS = ("case.json", "batch.npz", "expected.npz", "adapter_init")  # what only a case holds
STEPS = 3  # optimizer steps of a case
TOLERANCE = 1e-4  # or DRIFTS times the drift of the outside float32 run from its float64 one, if that is more
DRIFTS = 5
MAX_EXPANSION = 50  # of a case's compressed arrays
FLIP_MARGIN = 3e-6  # float32 noise: an int8 rounding closer than this to a tie may flip
FLIP_TOLERANCE = 5e-2  # instead of TOLERANCE where roundings may flip: in the outside float32 run too


@dataclass(frozen=True)
class GoldenCase:
    """As read. `samples`: the rows of the batch without their padding; `mask`, bool [B, T]: where these were."""

    name: str
    checkpoint: Checkpoint
    lora: LoraConfig
    tensors: dict  # the adapter at the start, by PEFT name
    samples: list
    mask: np.ndarray
    settings: dict  # case.json
    expected: dict  # expected.npz

    def part(self, prefix: str) -> dict:
        """Expected arrays "<prefix>.<tensor>", by tensor."""
        prefix += "."
        return {k.removeprefix(prefix): v for k, v in self.expected.items() if k.startswith(prefix)}

    def has(self, *names: str) -> bool:
        """Whether any of these is expected; a name with a dot stands for all "<name><tensor>"."""
        return any(k in names or k.split(".")[0] + "." in names for k in self.expected)

    def may_flip(self, phase: str) -> bool:
        """Whether a rounding of this phase ("loss", "steps" or "greedy") is so near a tie that it may flip."""
        margin = (self.settings.get("rounding_margin") or {}).get(phase)
        return margin is not None and margin < FLIP_MARGIN

    def tolerance(self, quantity: str, phase: str) -> float:
        """The error that `quantity`, a name in `float32_vs_float64`, may have."""
        drift = (self.settings.get("float32_vs_float64") or {}).get(quantity) or 0.0
        return max(FLIP_TOLERANCE if self.may_flip(phase) else TOLERANCE, DRIFTS * drift)


@dataclass
class Result:
    """What a run of a case gave, in the expectation's form; None where nothing was expected."""

    loss: float | None = None
    logits: np.ndarray | None = None  # [tokens, V]: the rows where the mask is 1
    grads: dict | None = None
    step_losses: list | None = None
    grad_norms: list | None = None
    after3: dict | None = None
    greedy: np.ndarray | None = None  # [tokens, V]: the logits before each expected token
    base_greedy: np.ndarray | None = None


def choose_cases(paths: list[str]) -> tuple[list[Path], list[Path]]:
    """(cases, others): a glob over cases also finds notes and folders of other things, which are no cases.

    A folder that holds any part of a case counts as one, and `read_case` says what it lacks; so does what does not
    exist. UserError when no case is left.
    """
    cases, others = [], []
    for path in map(Path, paths):
        is_case = not path.exists() or any((path / part).exists() for part in PARTS)
        (cases if is_case else others).append(path)
    if not cases:
        raise UserError(f"{', '.join(map(str, others[:3]))}: no golden case directory, holding case.json")
    return cases, others


def read_case(folder: str | Path, model: str | None = None) -> GoldenCase:
    """Read and check a case; a case without a model of its own takes `model`.

    UserError, naming the file, for anything that is missing, damaged or does not fit together.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; wanted a golden case directory, holding case.json")
    settings = read_json_object(folder / "case.json")
    own = (folder / "config.json").exists()
    if not own and model is None:
        named = f"; case.json names {brief(settings['model'])}" if "model" in settings else ""
        raise UserError(f"{folder}: holds no model (config.json); give one with --model{named}")
    checkpoint = open_checkpoint(folder if own else model)
    lora, tensors = read_adapter(folder / "adapter_init", checkpoint.config)
    samples, mask = _read_batch(folder / "batch.npz", checkpoint.config.vocab_size)
    expected = _read_arrays(folder / "expected.npz")
    case = GoldenCase(folder.resolve().name, checkpoint, lora, tensors, samples, mask, settings, expected)
    _check_expected(folder / "expected.npz", case)
    if case.has("step_losses", "grad_norms", "after3.", "greedy") and not settings.get("adamw"):
        raise UserError(f"{folder}/case.json: adamw is missing; the optimizer steps in expected.npz need its settings")
    return case


def _read_arrays(path: Path) -> dict:
    try:
        _check_sizes(path)
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (*_UNREADABLE, OSError) as error:
        raise UserError(f"{path}: no readable .npz of plain arrays: {error}") from None


_UNREADABLE = (ValueError, EOFError, KeyError, AttributeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def _check_sizes(path: Path) -> None:
    """ValueError unless each array holds the bytes that its shape says, and the file expands as numbers do.

    NumPy allocates what a shape says before it reads.
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
                    raise ValueError(f"{brief(member.filename)} holds {held} bytes, not those of {dtype} {shape}")


def _read_batch(path: Path, vocab: int) -> tuple[list, np.ndarray]:
    """The rows as samples without their right padding, and where they were."""
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
        raise UserError(f"{path}: input_ids holds values that are no token of a vocabulary of {vocab}")
    rows = [Sample(i[m].astype(np.int32), x[m].astype(np.int32)) for i, x, m in zip(ids, labels, mask, strict=True)]
    if not any(row.targets for row in rows):
        raise UserError(f"{path}: labels hold no target token")
    return rows, mask


def _check_expected(path: Path, case: GoldenCase):
    """UserError unless the expected arrays are of this model, adapter and batch, and there is something to check."""
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
                raise UserError(f"{path}: {name} is no list of tokens of a vocabulary of {vocab}")
        if kind in case.expected:
            shapes[f"{kind}_gap"] = case.expected[kind].shape
    for name, shape in shapes.items():
        if name in case.expected and case.expected[name].shape != shape:
            raise UserError(f"{path}: {name} has shape {case.expected[name].shape}; wanted {shape}")
    if not any(name in shapes for name in case.expected):
        raise UserError(f"{path}: holds nothing that can be checked, only {sorted(case.expected)[:3]}")
