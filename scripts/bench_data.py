"""How fast data become tokens, beside the `tokenizers` library alone, and what packing brings.

    python scripts/bench_data.py tokenize --model MODEL --data FILE.jsonl [--megabytes 40] [--workers N] [--pairs 3]
    python scripts/bench_data.py pack [--config configs/tiny.yaml] [--device cpu] [--pairs 5]

`tokenize`: conversations of the file's first megabytes, with template, mask and files, by our worker processes; and the
rendered texts, in memory already, by `encode_batch` in as many threads. Both in bytes of the file, one after the other,
pair by pair, since a machine is seldom quiet. `pack`: real tokens a second of training with `sample_packing` and
without, in turns; both see the same kinds of samples.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

SEQUENCE, ROWS = 2048, 4096  # tokens of a sample at most; rows of a micro-batch whose filling is told


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
        alone = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        settings = EncodeSettings(SEQUENCE, "truncate", False, ("assistant",))
        ratios = []
        for pair in range(args.pairs):
            loading = LoadSettings(
                settings, tokenizer, template, cache_dir=Path(folder) / str(pair), workers=args.workers
            )
            ours, store = timed(lambda loading=loading: tokenize(DatasetSpec(str(part)), loading))
            theirs, _ = timed(lambda: encode_all(alone, texts))
            again, _ = timed(lambda loading=loading: tokenize(DatasetSpec(str(part)), loading))
            ratios.append(theirs / ours)
            print(
                f"{size / 1e6:.1f} MB, {len(store):,} chats, {args.workers} workers: {size / ours / 1e6:.2f} MB/s, "
                f"tokenizers alone {size / theirs / 1e6:.2f} MB/s, ratio {ratios[-1]:.2f}; second start {again:.2f} s",
                flush=True,
            )
        print(f"ratio, median of {args.pairs} pairs: {statistics.median(ratios):.2f}")
        print(
            "rows of micro-batches that hold a token: " + ", ".join(f"{k} {v:.2%}" for k, v in filling(store).items())
        )


def encode_all(tokenizer, texts: list[str]) -> int:
    """Texts a thousand at a time, ids taken out of the library: the number of tokens."""
    starts = range(0, len(texts), 1000)
    return sum(
        len(e.ids) for i in starts for e in tokenizer.encode_batch(texts[i : i + 1000], add_special_tokens=False)
    )


def filling(store) -> dict[str, float]:
    """Real tokens of the rows computed in an epoch, packed and with 8 samples a micro-batch."""
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
    from lorawgpu.config.schema import load_config
    from lorawgpu.gpu import KernelCache, open_device
    from lorawgpu.train.setup import build_engine, prepare

    device = open_device(args.device)
    kernels, sides = KernelCache(device), {}
    for packing in (True, False):
        run = prepare(load_config(args.config, [f"sample_packing={str(packing).lower()}"]))
        sides[packing] = (
            build_engine(run, device, kernels),
            run.batches.step_batches(),
            run.schedule.lr(run.schedule.warmup_steps),
        )
    for engine, batches, lr in sides.values():  # every capacity is recorded and compiled
        step(engine, islice(batches, 12), lr)
    ratios = []
    for _ in range(args.pairs):
        packed, plain = (
            step(engine, islice(batches, args.steps if packing else 3 * args.steps), lr)
            for packing, (engine, batches, lr) in sides.items()
        )
        ratios.append(packed / plain)
        print(f"packed {packed:,.0f} tok/s, not packed {plain:,.0f} tok/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"{device.name}: ratio, median of {args.pairs} pairs: {statistics.median(ratios):.2f}")


def step(engine, batches, lr: float) -> float:
    """Real tokens a second of some optimizer steps; on a software adapter, which is this process, a processor second:
    others on the machine do not count."""
    clock = time.process_time if engine.device.is_cpu else time.perf_counter
    tokens, start = 0, clock()
    for number, batch in enumerate(batches, 1):
        engine.step(batch.micro_batches, number, lr)
        tokens += batch.tokens
    engine.loss_sum()  # waits
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
    words.add_argument("--chat-template", help="a built-in, when not the model's own")
    words.add_argument("--megabytes", type=float, default=40)
    words.add_argument("--workers", type=int, default=os.cpu_count())
    words.add_argument("--pairs", type=int, default=3)
    words.set_defaults(run=bench_tokenizing)
    rows = commands.add_parser("pack")
    rows.add_argument("--config", default="configs/tiny.yaml")
    rows.add_argument("--device", default="auto")
    rows.add_argument("--pairs", type=int, default=5)
    rows.add_argument("--steps", type=int, default=4, help="packed steps of a turn; three times as many of the others")
    rows.set_defaults(run=bench_packing)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":  # worker processes import this file
    main()
