"""Time training steps at the shapes of published models, with random weights made on the device.

    python scripts/bench_train.py --shape qwen3-0.6b gemma-3-1b [--tokens N] [--seq N] [--checkpointing]
        [--store bf16 q4_k_m] [--peer float32 bfloat16] [--seconds S] [--profile] [--csv]

LoRA r=16 on all linear layers, AdamW, clipping, every token a target. For each shape, all stores and peers
(transformers + PEFT on the same GPU) take turns in one process, together with a float32 product in our own tiles; the
medians of their turns are compared. Prints the median step time, tokens/s, GPU memory (as counted by the device), the
operations of a step, and the step's time over the time of these operations at the rate of our tiles.

--seconds is a shape's budget, setup included. --profile adds GPU time and rates by kind of kernel. --table DIR gathers
the per-layer inputs of Gemma 4 from a table of the real size, written there. --csv appends to benchmarks/results.csv.
"""

import argparse
import csv
import gc
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench_peer import OutOfMemory, Peer
from bench_turns import Steps, TileRate, operations

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.gpu.profile import profile
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import DENSE_STORES, SHAPES, synthetic_model

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results.csv"
PEERS = ("float32", "bfloat16")
COLUMNS = (
    *("date", "commit", "adapter", "driver", "shape", "tokens", "seq", "store", "checkpointing"),
    *("ms", "tok_s", "peak_gib", "encode_ms", "gpu_waits"),
    *(f"peer_{dtype}_{what}" for dtype in PEERS for what in ("tok_s", "gib")),
    *("tflop", "tile_tflop_s", "over_tiles", "per_layer_ms"),
)
RANK = 16
TABLE_BLOCK = 1 << 25  # elements of the random block that fills a table of per-layer inputs
GATHERS = 5


def random_batch(config, tokens, seq, rng):
    """`tokens` random tokens in sequences of `seq`; all are targets except the first of each sequence."""
    samples = []
    for start in range(0, tokens, seq):
        ids = rng.integers(3, config.vocab_size, min(seq, tokens - start)).astype(np.int32)
        samples.append(Sample(ids, ids))
    return flatten(samples, tokens)


def per_layer_table(folder: Path, config) -> np.ndarray:
    """The table of per-layer inputs of a model's real size, memory-mapped; bf16 values of magnitude 0.5 to 1."""
    shape = (config.per_layer_vocab, config.per_layer_input * config.num_hidden_layers)
    path, size = folder / "per_layer_table.bin", 2 * shape[0] * shape[1]
    if not path.exists() or path.stat().st_size != size:
        folder.mkdir(parents=True, exist_ok=True)
        block = np.random.default_rng(0).integers(0, 1 << 16, min(TABLE_BLOCK, size // 2), np.uint16) & 0x807F | 0x3F00
        with path.open("wb") as file:
            for start in range(0, size // 2, len(block)):
                file.write(block[: size // 2 - start].data)
    return np.memmap(path, np.uint16, "r", shape=shape)


class Ours:
    """A model of random weights and its engine, after their first step."""

    def __init__(self, args, config, store):
        self.store, start = store, time.perf_counter()
        self.device = open_device(args.device)
        self.kernels = KernelCache(self.device)
        model = synthetic_model(self.device, self.kernels, config, store)
        if config.per_layer_input and args.table:
            table = per_layer_table(args.table, config)
            model = replace(model, per_layer=replace(model.per_layer, gather=lambda ids: table[ids]))
        lora = LoraConfig(r=RANK, alpha=2 * RANK, target_modules=config.all_linear())
        options = Options(args.tokens, args.seq, checkpointing=args.checkpointing, attention=args.attention)
        adapter = AdapterLayout(lora, config), init_adapter(lora, config, 0)
        self.engine = Engine(self.device, model, options, *adapter, AdamW(), self.kernels)
        self.batch = random_batch(config, args.tokens, args.seq, np.random.default_rng(0))
        self.engine.step([self.batch], 1, 1e-4)
        self.first_loss = self.loss()
        self.held, self.peak_gib = dict(self.device.memory.held), self.device.memory.total / 2**30
        self.steps = Steps(self.engine, self.batch)
        self.turn = self.steps.turn
        print(f"{store}: setup and first step {time.perf_counter() - start:.1f} s", flush=True)

    def loss(self) -> float:
        return self.engine.loss_sum() / self.batch.targets

    def operations(self) -> float:
        return operations(self.engine.plan("train", self.batch.capacity), self.batch, self.engine.model.config.layers)

    def per_layer_seconds(self) -> float:
        """Median seconds to gather and upload the per-layer inputs of a batch of random tokens, nothing overlapping."""
        engine, rng, times = self.engine, np.random.default_rng(1), []
        for _ in range(GATHERS if engine.model.per_layer else 0):
            ids = rng.integers(0, engine.model.config.vocab_size, self.batch.capacity)
            self.device.wait()
            start = time.perf_counter()
            engine.batch.write_per_layer(self.device, engine.model, ids)
            self.device.wait()
            times.append(time.perf_counter() - start)
        return float(np.median(times)) if times else 0.0

    def profile(self):
        recorded = self.engine.plan("train", self.batch.capacity)
        self.engine.begin()
        self.engine.write(self.batch)
        show_profile(profile(recorded.plan, recorded.sections(self.batch.targets)))

    def close(self):
        """Free the GPU's memory."""
        self.device.wgpu.destroy()
        self.engine = self.steps = self.turn = None
        gc.collect()


def show_profile(kinds):
    total = sum(v[0] for v in kinds.values())
    print(f"{'GPU time by kind':44} {'ms':>9} {'share':>6} {'calls':>6} {'TFLOP/s':>8} {'TB/s':>6}")
    for kind, (seconds, count, flops, nbytes) in sorted(kinds.items(), key=lambda kv: -kv[1][0]):
        bound = "<" if kind.startswith("attention_flash") else ""  # its operations are an upper bound
        rate = f"{bound}{flops / seconds / 1e12:.1f}"
        print(
            f"{kind:44} {seconds * 1e3:9.2f} {seconds / total:6.1%} {count:6} {rate:>8} {nbytes / seconds / 1e12:6.2f}"
        )
    print(f"{'total':44} {total * 1e3:9.2f}", flush=True)


@dataclass(frozen=True)
class Result:
    """What was measured of one store or peer of a shape: seconds per step, and GiB."""

    seconds: float
    gib: float


def take_turns(turns: dict, seconds: float, until: float) -> dict[str, float]:
    """The median of each contestant's turns of about `seconds`; rounds go on until `until`, at least two.

    The first round does not count: GPU clocks take seconds to ramp up.
    """
    values = {name: [] for name in turns}
    rounds = 0
    while True:
        start = time.perf_counter()
        for name, turn in turns.items():
            values[name].append(turn(seconds))
        now, rounds = time.perf_counter(), rounds + 1
        if rounds > 1 and 2 * now - start > until:
            print(f"{rounds - 1} rounds; steps of each in ms or Gop/s: ", end="")
            print({name: [round(v * 1e3 if v < 1e6 else v / 1e9, 1) for v in found] for name, found in values.items()})
            return {name: float(np.median(found[1:])) for name, found in values.items()}


def peers(args, name) -> dict[str, Peer]:
    """The peers that fit on the GPU, by dtype."""
    found, settings = {}, {"rank": RANK, "tokens": args.tokens, "seq": args.seq, "checkpointing": args.checkpointing}
    for dtype in args.peer:
        start = time.perf_counter()
        try:
            found[dtype] = Peer(CONFIGS[name], SHAPES[name].all_linear(), dtype=dtype, **settings)
        except OutOfMemory as error:
            print(f"transformers + PEFT {dtype} does not fit: {error}", flush=True)
            continue
        print(f"transformers + PEFT {dtype}: setup and first steps {time.perf_counter() - start:.1f} s", flush=True)
    return found


def bench(args, name: str) -> list[dict]:
    """Measure one shape; a row of COLUMNS for each store."""
    until = time.perf_counter() + args.seconds
    ours = {store: Ours(args, SHAPES[name], store) for store in args.store}
    others, first = peers(args, name), next(iter(ours.values()))
    turns = {"tiles": TileRate(first.device, first.kernels).turn}
    turns |= {key: contestant.turn for key, contestant in (ours | others).items()}
    medians = take_turns(turns, args.turn, until)
    results = {dtype: Result(medians[dtype], peer.peak_gib) for dtype, peer in others.items()}
    for peer in others.values():
        peer.close()
    rows = [row(args, name, run, medians[store], medians["tiles"], results) for store, run in ours.items()]
    for run in ours.values():
        if args.profile:
            run.profile()
        run.close()
    return rows


def row(args, name, run: Ours, seconds: float, rate: float, others: dict[str, Result]) -> dict:
    """One line of the table: what was measured of our run, and its peers. Prints the details."""
    flops, per_layer = run.operations(), run.per_layer_seconds()
    made = {
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit(), "adapter": run.device.name,
        "driver": run.device.driver, "shape": name, "tokens": args.tokens, "seq": args.seq, "store": run.store,
        "checkpointing": args.checkpointing, "ms": round(seconds * 1e3, 2), "tok_s": round(args.tokens / seconds),
        "peak_gib": round(run.peak_gib, 2), "encode_ms": round(float(np.median(run.steps.recording)) * 1e3, 2),
        "gpu_waits": round(run.steps.idle(), 3), "tflop": round(flops / 1e12, 3),
        "tile_tflop_s": round(rate / 1e12, 2), "over_tiles": round(seconds * rate / flops, 3),
    }  # fmt: skip
    for dtype, result in others.items():
        made |= {f"peer_{dtype}_tok_s": round(args.tokens / result.seconds), f"peer_{dtype}_gib": round(result.gib, 2)}
    if run.engine.model.per_layer:
        made["per_layer_ms"] = round(per_layer * 1e3, 2)
        print(f"per-layer inputs: {per_layer * 1e3:.1f} ms to gather and upload, {per_layer / seconds:.1%} of a step")
    memory = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in run.held.items())
    print(f"{name} {run.store}: loss {run.first_loss:.4f}, then {run.loss():.4f}; GiB: {memory}", flush=True)
    return made


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def show_table(rows: list[dict], args) -> None:
    """The results of all shapes: ours, then each peer's speed and memory, and ours over them."""
    print(f"\n{args.tokens} tokens in sequences of {args.seq}{', checkpointing' if args.checkpointing else ''}")
    head = (
        f"{'shape':20} {'store':7} {'ms':>8} {'tok/s':>7} {'GiB':>6} {'TFLOP':>7} {'tiles':>6} {'over':>5} {'idle':>5}"
    )
    print(head + "".join(f"  | {dtype:>9} tok/s    GiB  speed memory" for dtype in args.peer))
    for r in rows:
        line = f"{r['shape']:20} {r['store']:7} {r['ms']:8.1f} {r['tok_s']:7,} {r['peak_gib']:6.2f} {r['tflop']:7.2f} "
        line += f"{r['tile_tflop_s']:6.1f} {r['over_tiles']:5.2f} {r['gpu_waits']:5.1%}"
        for dtype in args.peer:
            if speed := r.get(f"peer_{dtype}_tok_s"):
                gib = r[f"peer_{dtype}_gib"]
                line += f"  | {speed:15,} {gib:6.2f} {r['tok_s'] / speed:5.2f}x {r['peak_gib'] / gib:5.2f}x"
        print(line)
    print("tiles: TFLOP/s of a float32 product in our tiles; over: the step's time over that of its TFLOP at that rate")


def append(row, path=RESULTS):
    """Append a row to the results. Missing COLUMNS stay empty. ValueError for an unknown key."""
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["smollm2-135m"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--store", choices=DENSE_STORES, nargs="+", default=["bf16"], help="stores of dense weights")
    parser.add_argument("--attention", choices=["flash", "chain"], default="flash")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0, help="budget of a shape, setup included")
    parser.add_argument("--turn", type=float, default=2.0, help="about the seconds of one turn")
    parser.add_argument("--table", type=Path, help="folder for the table of per-layer inputs; default: zeros")
    parser.add_argument("--device")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peer", nargs="+", default=[], choices=PEERS)
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--commit", help="default: git HEAD")
    args = parser.parse_args()
    rows = []
    for name in args.shape:
        print(f"== {name}", flush=True)
        found = bench(args, name)
        for made in found if args.csv else []:
            append(made)
        rows += found
    show_table(rows, args)


if __name__ == "__main__":
    main()
