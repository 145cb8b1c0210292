"""One rank of an MPI job: three steps of the run of a config, and what this rank holds then, in a file of its own.

Started by tests/test_mpi.py: `mpiexec -n N python mpi_rank.py CONFIG OUT_FOLDER`.
"""

import sys
from pathlib import Path

import numpy as np

from lorawgpu.config.load import load_config
from lorawgpu.gpu import open_device
from lorawgpu.train.placement import engine_of
from lorawgpu.train.ranks import companions
from lorawgpu.train.setup import prepare
from lorawgpu.weights.device_model import load_model

STEPS = 3
PIECE_BYTES = 4096  # so that the small adapter travels in several pieces


def work(config: Path, device, exchange=None, kernels=None) -> dict[str, np.ndarray]:
    """Losses and norms of the steps, the gradients of the first, the adapter after the last."""
    run = prepare(load_config(config), ranks=exchange.size if exchange else 1)
    engine = engine_of(run, device, load_model(device, run.checkpoint), kernels, exchange, piece_bytes=PIECE_BYTES)
    losses, norms, grads = [], [], {}
    for number, step in zip(range(1, STEPS + 1), run.batches.step_batches(), strict=False):
        divisor = engine.step(step.micro_batches, number, 1e-2)
        losses.append(engine.loss_sum() / divisor)
        norms.append(engine.grad_norm())
        grads = grads or {f"grads.{name}": tensor for name, tensor in engine.tensors("grads").items()}
    update = {f"update.{name}": tensor - run.start[name] for name, tensor in engine.tensors().items()}
    return {"losses": np.array(losses), "norms": np.array(norms)} | grads | update


if __name__ == "__main__":
    with companions() as exchange:
        device = open_device(local_rank=exchange.local_rank)
        found = work(Path(sys.argv[1]), device, exchange)
        np.savez(Path(sys.argv[2]) / f"rank{exchange.rank}.npz", device=np.array(device.name), **found)
