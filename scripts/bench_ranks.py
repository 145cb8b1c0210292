"""Time training steps of several ranks next to those of one: mpiexec -n 2 python scripts/bench_ranks.py [--csv FILE].

    mpiexec -n 2 python scripts/bench_ranks.py [--shape bitnet-2b smollm2-135m] [--tokens 4096 512] [--seconds S]

Random weights, LoRA r=16 on all linear layers, AdamW, one micro-batch of --tokens a rank and step. First rank 0 takes
three steps over the micro-batches of all ranks, and all ranks take the same together: prints how far the updates are
apart, and whether all ranks hold the same bits. Then the medians of rank 0 alone, one micro-batch a step while the
others wait, and of all ranks; the speedup is that in tokens per second.
"""

import argparse
import csv
import hashlib
import time
from pathlib import Path

import numpy as np

from lorawgpu.bench.training import RANK, random_batch
from lorawgpu.cli import main_of
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.exchange import Exchange
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter
from lorawgpu.optim.adamw import AdamW
from lorawgpu.train.ranks import companions
from lorawgpu.train.shares import exchange_seconds
from lorawgpu.weights.synthetic import SHAPES, synthetic_model

SEQ = 512
CHECKED, RATE = 3, 1e-3  # steps that are compared, and their learning rate
FIRST = 3  # steps that do not count


def median_step(engine: Engine, batches: list, count: int) -> float:
    """Seconds of a step, of `count` that follow FIRST others."""
    seconds = []
    for number in range(1, FIRST + count + 1):
        start = time.perf_counter()
        engine.step(batches, number, RATE)
        engine.device.wait()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[FIRST:]))


def flat(engine: Engine) -> np.ndarray:
    engine.settle()
    return engine.device.read(engine.adapter.params)


def bench(exchange: Exchange, device, shape: str, tokens: int, seconds: float) -> dict:
    config, kernels = SHAPES[shape], KernelCache(device)
    model = synthetic_model(device, kernels, config)
    lora = LoraConfig(r=RANK, alpha=2 * RANK, target_modules=config.all_linear())
    layout, tensors = AdapterLayout(lora, config), init_adapter(lora, config, 0)
    options = Options(tokens, min(SEQ, tokens))
    batches = [random_batch(config, tokens, SEQ, np.random.default_rng(rank)) for rank in range(exchange.size)]
    alone, together = (
        Engine(device, model, options, layout, tensors, AdamW(epsilon=1e-3), kernels, exchange=each)
        for each in (None, exchange)
    )
    start = flat(alone)
    for number in range(1, CHECKED + 1):
        together.step(batches, number, RATE)
        if exchange.leads:
            alone.step(batches, number, RATE)
    digests = exchange.gather(hashlib.sha256(flat(together).tobytes()).hexdigest())
    one, all_ranks = flat(alone) - start, flat(together) - start
    found = {"shape": shape, "tokens": tokens, "ranks": exchange.size, "bit_equal": len(set(digests)) == 1}
    if exchange.leads:
        found["update_error"] = float(np.linalg.norm(all_ranks - one) / np.linalg.norm(one))
        first = median_step(alone, batches[:1], 1)
    count = exchange.gather(max(3, int(seconds / 2 / first)) if exchange.leads else 0)[0]
    if exchange.leads:
        found["alone_ms"] = 1e3 * median_step(alone, batches[:1], count)
    exchange.gather(None)
    found["ranks_ms"] = 1e3 * median_step(together, batches, count)
    found["exchange_ms"] = 1e3 * exchange_seconds(together)
    found["sent_mb"] = together.shards.nbytes / 1e6
    if exchange.leads:
        found["speedup"] = exchange.size * found["alone_ms"] / found["ranks_ms"]
    return found


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["bitnet-2b", "smollm2-135m"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 512])
    parser.add_argument("--seconds", type=float, default=20, help="of timing, for each shape and number of tokens")
    parser.add_argument("--device", help="as for lorawgpu train")
    parser.add_argument("--csv", type=Path, help="append the results to this file")
    args = parser.parse_args(argv)
    with companions() as exchange:
        for shape in args.shape:
            for tokens in args.tokens:
                device = open_device(args.device, local_rank=exchange.local_rank)
                found = bench(exchange, device, shape, tokens, args.seconds)
                print(f"{device.name}: {found}", flush=True)
                if args.csv and exchange.leads:
                    append(args.csv, found)
                device.wgpu.destroy()
    return 0


def append(path: Path, found: dict) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, found)
        if new:
            writer.writeheader()
        writer.writerow(found)


if __name__ == "__main__":
    raise SystemExit(main_of(run)())
