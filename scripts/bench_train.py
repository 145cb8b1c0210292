"""`lorawgpu bench` next to transformers + PEFT, and into benchmarks/results.csv.

    python scripts/bench_train.py --shape qwen3-0.6b gemma-3-1b [--tokens N] [--seq N] [--rank R] [--checkpointing]
        [--store bf16 q4_k_m] [--peer float32 bfloat16] [--seconds S] [--profile] [--csv]

Training steps as lorawgpu/bench/training.py times them. For each shape, all stores and peers (transformers + PEFT on
the same GPU) take turns in one process. Prints the median step time, tokens/s, GPU memory (as counted by the device),
the operations of a step, and the step's time over the time of these operations at the rate of our tiles.

--seconds is a shape's budget, setup included. --profile adds GPU time and rates by kind of kernel. --table DIR gathers
the per-layer inputs of Gemma 4 from a table of the real size, written there. --csv appends to benchmarks/results.csv.
"""

import argparse
import csv
import subprocess
import time
from pathlib import Path

from bench_peer import OutOfMemory, Peer

from lorawgpu.bench.training import RANK, SEQ, TOKENS, BenchSettings, measure_shape, show_table
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import DENSE_STORES, SHAPES

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results.csv"
PEERS = ("float32", "bfloat16")
COLUMNS = (
    *("date", "commit", "adapter", "driver", "shape", "tokens", "seq", "store", "checkpointing"),
    *("ms", "tok_s", "peak_gib", "encode_ms", "gpu_waits"),
    *(f"peer_{dtype}_{what}" for dtype in PEERS for what in ("tok_s", "gib")),
    *("tflop", "tile_tflop_s", "over_tiles", "per_layer_ms"),
)


def settings_of(args) -> BenchSettings:
    names = ("tokens", "seq", "rank", "attention", "checkpointing", "device", "table", "seconds", "turn")
    return BenchSettings(**{name: getattr(args, name) for name in names})


def peers(args, name) -> dict[str, Peer]:
    """The peers that fit on the GPU, by dtype."""
    settings = {"rank": args.rank, "tokens": args.tokens, "seq": args.seq, "checkpointing": args.checkpointing}
    found = {}
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
    others: dict[str, Peer] = {}

    def started() -> dict[str, Peer]:
        others.update(peers(args, name))
        return others

    made = measure_shape(settings_of(args), name, args.store, started, args.profile)
    return [row(args, record, {dtype: peer.peak_gib for dtype, peer in others.items()}) for record in made]


def row(args, record: dict, gib: dict[str, float]) -> dict:
    """One line of the table: what was measured of our run, and its peers."""
    made = {"date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit()}
    made |= {name: value for name, value in record.items() if name in COLUMNS}
    for dtype, seconds in record["others"].items():
        made |= {f"peer_{dtype}_tok_s": round(args.tokens / seconds), f"peer_{dtype}_gib": round(gib[dtype], 2)}
    return made


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def show_rows(rows: list[dict], args) -> None:
    """The results of all shapes: ours, then each peer's speed and memory, and ours over them."""

    def beside(r: dict) -> str:
        line = ""
        for dtype in args.peer:
            if speed := r.get(f"peer_{dtype}_tok_s"):
                gib = r[f"peer_{dtype}_gib"]
                line += f"  | {speed:15,} {gib:6.2f} {r['tok_s'] / speed:5.2f}x {r['peak_gib'] / gib:5.2f}x"
        return line

    head = "".join(f"  | {dtype:>9} tok/s    GiB  speed memory" for dtype in args.peer)
    show_table(settings_of(args), rows, head, beside)


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
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--rank", type=int, default=RANK)
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
    show_rows(rows, args)


if __name__ == "__main__":
    main()
