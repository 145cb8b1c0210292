"""Compare mlx-lm, running our exported adapter, with lorawgpu: logits of the same tokens, with and without the adapter.

    pip install mlx-lm        (Linux: pip install "mlx[cpu]" mlx-lm)
    python scripts/check_mlx.py --model tests/golden/llama_dense --mlx-python PYTHON > benchmarks/mlx.txt

PYTHON is the interpreter of the environment with mlx-lm (default: this one). The adapters are random: one plain, one
with rsLoRA and rank and alpha patterns. mlx-lm's weights are widened to float32, so that both sides compute the same
products, in a different order. The exit code is 1 if they disagree.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lorawgpu.api.model import load
from lorawgpu.cli import main_of
from lorawgpu.errors import CheckFailed
from lorawgpu.export.__main__ import main as export
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes, write_adapter
from lorawgpu.weights.loader import open_checkpoint

EXACT = 1e-4  # float32 in a different order
ADAPTERS = {
    "plain": LoraConfig(4, 8, LINEAR_MODULES),
    "peculiar": LoraConfig(
        4, 8, ("q_proj", "k_proj", "up_proj"), True, 0.1, {"k_proj": 6}, {"q_proj": 3, "layers.1.mlp.up_proj": 0.5}
    ),
}
THEIRS = """
import json, sys
from pathlib import Path
import mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
from mlx.utils import tree_map
from mlx_lm.utils import load_adapters, load_model
model, adapter, ids, out = sys.argv[1:]
llm = load_model(Path(model))[0]
if adapter:
    llm = load_adapters(llm, adapter)
llm.update(tree_map(lambda p: p.astype(mx.float32), llm.parameters()))
llm.eval()
np.save(out, np.array(llm(mx.array([json.loads(ids)]))[0]))
"""


def theirs(python: str, model: Path, adapter: Path | None, ids: list[int], folder: Path) -> np.ndarray:
    """mlx-lm's logits [len(ids), V], from a process in its own environment."""
    out = folder / "theirs.npy"
    argv = [python, "-c", THEIRS, str(model), str(adapter or ""), json.dumps(ids), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"mlx-lm failed: {done.stderr[-2000:]}")
    return np.load(out)


def random_adapter(folder: Path, lora: LoraConfig, model: Path) -> Path:
    random = np.random.default_rng(0)
    shapes = adapter_shapes(lora, open_checkpoint(model).config)
    tensors = {n: (random.standard_normal(s) / np.sqrt(4 * s[1])).astype(np.float32) for n, s in shapes.items()}
    write_adapter(folder, lora, tensors, "base")
    return folder


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mlx-python", default=sys.executable)
    args = parser.parse_args(argv)
    query = [args.mlx_python, "-c", "from importlib.metadata import version; print(version('mlx-lm'))"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    base = load(args.model)
    ids = (np.arange(40) * 37 % min(base.config.vocab_size, 1000)).tolist()
    print(f"mlx-lm {version}, {args.model.name}, {len(ids)} tokens; ||theirs - ours|| / ||ours||")
    without, faults = base.logits(ids), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {"none": (without, theirs(args.mlx_python, args.model, None, ids, folder))}
        for kind, lora in ADAPTERS.items():
            adapter, out = random_adapter(folder / kind, lora, args.model), folder / f"{kind}-mlx"
            argv = ["--adapter", adapter, "--model", args.model, "--to", "mlx", "--out", out]
            with contextlib.redirect_stdout(io.StringIO()):
                if export(list(map(str, argv))):
                    raise CheckFailed(f"the export of the {kind} adapter failed")
            rows[kind] = (load(args.model, adapter).logits(ids), theirs(args.mlx_python, args.model, out, ids, folder))
    for kind, (ours, others) in rows.items():
        error = relative(others, ours)
        print(f"{kind:<9} {error:.1e}   the adapter changes {relative(ours, without):.1e}")
        if not error <= EXACT:
            faults.append(f"{kind}: off by {error:.1e}")
    if faults:
        raise CheckFailed("; ".join(faults))
    print("mlx-lm agrees with us")


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
