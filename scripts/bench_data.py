"""Time tokenization against the bare `tokenizers` library, and measure what packing gains.

    python scripts/bench_data.py tokenize --model MODEL --data FILE.jsonl [--megabytes 40] [--workers N] [--pairs 3]
    python scripts/bench_data.py pack [--config configs/tiny.yaml] [--device cpu] [--pairs 5]

`tokenize`: the file's first megabytes, by our worker processes (parsing, chat template, loss mask and files included),
against `encode_batch` in as many threads on the rendered texts in memory. Both count bytes of the file and run
alternately, in pairs, because machines are noisy. `pack`: real tokens per second of training with and without
`sample_packing`, alternately, on the same data.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

SEQUENCE, ROWS = 2048, 4096  # most tokens in a sample; rows in a packed micro-batch


def bench_tokenizing(args: argparse.Namespace) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # before the library starts its threads
    import tokenizers

    from lorawgpu.chat.template import resolve_template
    from lorawgpu.data.dataset import DatasetSpec, LoadSettings, tokenize
    from lorawgpu.data.encode import EncodeSettings
    from lorawgpu.weights.loader import open_checkpoint

    tokenizer = open_checkpoint(args.model).tokenizer()
    template = resolve_template(args.chat_template, None, tokenizer.chat_template, tokenizer.special_tokens)
    with tempfile.TemporaryDirectory() as folder, open(args.data, "rb") as stream:
        lines = stream.readlines(int(args.megabytes * 1e6))
        part = Path(folder) / "part.jsonl"
        part.write_bytes(b"".join(lines))
        size = part.stat().st_size
        texts = [template.render(json.loads(line)["messages"]) for line in lines]
        bare = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        settings = EncodeSettings(SEQUENCE, "truncate", False, ("assistant",))
        ratios = []
        for pair in range(args.pairs):
            loading = LoadSettings(
                settings, tokenizer, template, cache_dir=Path(folder) / str(pair), workers=args.workers
            )
            ours, store = timed(lambda loading=loading: tokenize(DatasetSpec(str(part)), loading))
            theirs, _ = timed(lambda: encode_all(bare, texts))
            again, _ = timed(lambda loading=loading: tokenize(DatasetSpec(str(part)), loading))
            ratios.append(theirs / ours)
            print(
                f"{size / 1e6:.1f} MB, {len(store):,} chats, {args.workers} workers: {size / ours / 1e6:.2f} MB/s, "
                f"tokenizers only {size / theirs / 1e6:.2f} MB/s, ratio {ratios[-1]:.2f}; from cache {again:.2f} s",
                flush=True,
            )
        print(f"median ratio of {args.pairs} pairs: {statistics.median(ratios):.2f}")
        print(
            "rows of micro-batches that hold a token: " + ", ".join(f"{k} {v:.2%}" for k, v in filling(store).items())
        )


def encode_all(tokenizer, texts: list[str]) -> int:
    """Encode texts a thousand at a time and fetch the ids. Returns the number of tokens."""
    starts = range(0, len(texts), 1000)
    return sum(
        len(e.ids) for i in starts for e in tokenizer.encode_batch(texts[i : i + 1000], add_special_tokens=False)
    )


def filling(store) -> dict[str, float]:
    """Fraction of computed rows that hold a token, over an epoch: packed, and with 8 samples per micro-batch."""
    from lorawgpu.data.batch_order import Batches, BatchSettings

    found = {}
    for name, packing, capacity in (("packed", True, ROWS), ("8 samples each", False, 8 * SEQUENCE)):
        rows = tokens = 0
        for batch in Batches([store], BatchSettings(0, 8, 1, capacity, packing)).step_batches():
            rows += sum(b.capacity for b in batch.micro_batches)
            tokens += batch.tokens
            if batch.ends_epoch:
                break
        found[name] = tokens / rows
    return found


def bench_packing(args: argparse.Namespace) -> None:
    from lorawgpu.config.load import load_config
    from lorawgpu.gpu import KernelCache, open_device
    from lorawgpu.train.placement import build_engine
    from lorawgpu.train.setup import prepare

    device = open_device(args.device)
    kernels, sides = KernelCache(device), {}
    for packing in (True, False):
        run = prepare(load_config(args.config, [f"sample_packing={str(packing).lower()}"]))
        sides[packing] = (
            build_engine(run, device, kernels),
            run.batches.step_batches(),
            run.schedule.lr(run.schedule.warmup_steps),
        )
    for engine, batches, lr in sides.values():  # warm up: record and compile every capacity
        step(engine, islice(batches, 12), lr)
    ratios = []
    for _ in range(args.pairs):
        packed, plain = (
            step(engine, islice(batches, args.steps if packing else 3 * args.steps), lr)
            for packing, (engine, batches, lr) in sides.items()
        )
        ratios.append(packed / plain)
        print(f"packed {packed:,.0f} tok/s, not packed {plain:,.0f} tok/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"{device.name}: median ratio of {args.pairs} pairs: {statistics.median(ratios):.2f}")


def step(engine, batches, lr: float) -> float:
    """Real tokens per second over some optimizer steps.

    A software adapter runs in this process, so it is timed in CPU seconds, which other load does not affect.
    """
    clock = time.process_time if engine.device.is_cpu else time.perf_counter
    tokens, start = 0, clock()
    for number, batch in enumerate(batches, 1):
        engine.step(batch.micro_batches, number, lr)
        tokens += batch.tokens
    engine.loss_sum()  # waits for the GPU
    return tokens / (clock() - start)


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    words = commands.add_parser("tokenize")
    words.add_argument("--model", required=True)
    words.add_argument("--data", required=True, help="JSONL with `messages`")
    words.add_argument("--chat-template", help="a built-in template, instead of the model's own")
    words.add_argument("--megabytes", type=float, default=40)
    words.add_argument("--workers", type=int, default=os.cpu_count())
    words.add_argument("--pairs", type=int, default=3)
    words.set_defaults(run=bench_tokenizing)
    rows = commands.add_parser("pack")
    rows.add_argument("--config", default="configs/tiny.yaml")
    rows.add_argument("--device", default="auto")
    rows.add_argument("--pairs", type=int, default=5)
    rows.add_argument(
        "--steps", type=int, default=4, help="packed steps per turn; unpacked turns take three times as many"
    )
    rows.set_defaults(run=bench_packing)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":  # worker processes import this file
    main()
