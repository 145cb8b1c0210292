"""Time training steps at a model's real shape, with random weights made on the device.

    python scripts/bench_train.py --shape bitnet-2b [--tokens N] [--checkpointing] [--profile] [--peer float32 bfloat16]

LoRA r=16 on all seven linear layers, AdamW, clipping, every token a target. Prints the median step time, tokens/s, peak
GPU memory (as counted by the device), and encoding time; with --profile also GPU time and rates by kind of kernel.
--peer runs transformers + PEFT on the same GPU in the same run, in each given dtype. --csv appends the result to
benchmarks/results.csv.
"""

import argparse
import csv
import gc
import subprocess
import time
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.gpu.profile import Clock, profile
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter
from lorawgpu.optim.adamw import AdamW
from lorawgpu.train.step_reports import LateReader
from lorawgpu.weights.synthetic import DENSE_STORES, SHAPES, synthetic_model

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results.csv"
COLUMNS = (
    *("date", "commit", "adapter", "driver", "shape", "tokens", "seq", "store", "checkpointing"),
    *("ms", "tok_s", "peak_gib", "encode_ms", "gpu_waits"),
    *("peer_float32_tok_s", "peer_float32_gib", "peer_bfloat16_tok_s", "peer_bfloat16_gib"),
)
RANK = 16
MAX_GROUP = 8  # most steps between two waits for the GPU
GROUP_SECONDS = 1.0  # about the longest time between two waits


def random_batch(config, tokens, seq, rng):
    """`tokens` random tokens in sequences of `seq`; all are targets except the first of each sequence."""
    samples = []
    for start in range(0, tokens, seq):
        ids = rng.integers(3, config.vocab_size, min(seq, tokens - start)).astype(np.int32)
        samples.append(Sample(ids, ids))
    return flatten(samples, tokens)


def group_of(step_seconds: float) -> int:
    """Number of steps between two waits."""
    return max(1, min(MAX_GROUP, int(GROUP_SECONDS / step_seconds)))


class Steps:
    """Runs training steps as the trainer does: several in flight, with reports read late."""

    def __init__(self, engine, batch):
        self.engine, self.batch, self.late, self.step, self.group = engine, batch, LateReader(engine), 1, 1

    def run(self, seconds) -> tuple[float, float]:
        """(median seconds per step, median seconds that Python takes to encode one), over about `seconds`.

        Encoding is timed on the first step of each group; later steps also wait for room in the queue.
        """
        rates, recording, until = [], [], time.perf_counter() + seconds
        while not rates or time.perf_counter() < until:
            start = time.perf_counter()
            for i in range(self.group):
                self.step += 1
                self.engine.step([self.batch], self.step, 1e-4)
                if i == 0:
                    recording.append(time.perf_counter() - start)
                self.late.push(self.step)
            self.late.drain()
            rates.append((time.perf_counter() - start) / self.group)
            self.group = group_of(rates[-1])
        return float(np.median(rates)), float(np.median(recording))

    def busy(self) -> tuple[float, float]:
        """(seconds the GPU was busy, seconds from begin to end) for a group of steps."""
        clock = Clock(self.engine.plans())
        self.run(0)
        return clock.busy()


def ours(args, config):
    """Median seconds per step, and other measurements."""
    device = open_device(args.device)
    kernels = KernelCache(device)
    start = time.perf_counter()
    model = synthetic_model(device, kernels, config, args.store)
    lora = LoraConfig(r=RANK, alpha=2 * RANK, target_modules=LINEAR_MODULES)
    options = Options(args.tokens, args.seq, checkpointing=args.checkpointing, attention=args.attention)
    engine = Engine(
        device, model, options, AdapterLayout(lora, config), init_adapter(lora, config, 0), AdamW(), kernels
    )
    batch = random_batch(config, args.tokens, args.seq, np.random.default_rng(0))
    engine.step([batch], 1, 1e-4)
    losses = [engine.loss_sum() / batch.targets]
    print(f"setup and first step {time.perf_counter() - start:.1f} s, loss {losses[0]:.4f}", flush=True)
    steps = Steps(engine, batch)
    steps.run(args.seconds / 2)  # GPU clocks take seconds to ramp up
    step_seconds, encode = steps.run(args.seconds / 2)
    busy, span = steps.busy()
    losses.append(engine.loss_sum() / batch.targets)
    result = {
        "seconds": step_seconds,
        "encode": encode,
        "waits": 1 - busy / span,
        "peak_gib": device.memory.total / 2**30,
        "memory": device.memory.held,
        "device": device,
        "losses": losses,
    }
    if args.profile:
        recorded = engine.plan("train", batch.capacity)
        engine.begin()
        engine.write(batch)
        show_profile(profile(recorded.plan, recorded.sections(batch.targets)))
    return result


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


def peer(args, config, dtype_name):
    """(median seconds per step, peak GiB) of transformers + PEFT with the same sizes."""
    import torch
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitNetConfig, LlamaConfig

    layer = config.layers[0]
    kwargs = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": layer.attention.heads,
        "num_key_value_heads": layer.attention.kv_heads,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    bitnet, head_dim = config.family == "bitnet", layer.attention.head_dim
    hf = BitNetConfig(**kwargs) if bitnet else LlamaConfig(head_dim=head_dim, **kwargs)
    dtype = getattr(torch, dtype_name)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = get_peft_model(model, PeftLora(r=RANK, lora_alpha=2 * RANK, target_modules=list(LINEAR_MODULES)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids = torch.randint(3, config.vocab_size, (args.tokens // args.seq, args.seq), device="cuda")
    times, group = [], 1
    until = time.perf_counter() + args.seconds
    while len(times) < 4 or time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(group):
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / group)
        group = group_of(times[-1])
    peak = torch.cuda.max_memory_allocated() / 2**30
    del model, optimizer, parameters
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return float(np.median(times[len(times) // 2 :])), peak


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
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--store", choices=DENSE_STORES, default="bf16", help="store of dense weights")
    parser.add_argument("--attention", choices=["flash", "chain"], default="flash")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to time")
    parser.add_argument("--device")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peer", nargs="+", default=[], choices=["float32", "bfloat16"])
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--commit", help="default: git HEAD")
    args = parser.parse_args()
    config = SHAPES[args.shape]
    result = ours(args, config)
    rate = args.tokens / result["seconds"]
    print(
        f"{args.shape} {args.tokens} tokens, sequences of {args.seq}{', checkpointing' if args.checkpointing else ''}: "
        f"{result['seconds'] * 1e3:.1f} ms per step, {rate:,.0f} tok/s, peak {result['peak_gib']:.2f} GiB; "
        f"Python encodes a step in {result['encode'] * 1e3:.1f} ms; the GPU idles {result['waits']:.1%} of the time"
    )
    print({k: f"{v / 2**30:.2f} GiB" for k, v in result["memory"].items()}, "losses", result["losses"], flush=True)
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit
        or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "adapter": result["device"].name,
        "driver": result["device"].driver,
        "shape": args.shape,
        "tokens": args.tokens,
        "seq": args.seq,
        "store": args.store,
        "checkpointing": args.checkpointing,
        "ms": round(result["seconds"] * 1e3, 2),
        "tok_s": round(rate),
        "peak_gib": round(result["peak_gib"], 2),
        "encode_ms": round(result["encode"] * 1e3, 2),
        "gpu_waits": round(result["waits"], 3),
    }
    for dtype in args.peer:
        seconds, peak = peer(args, config, dtype)
        print(
            f"transformers + PEFT {dtype}: {seconds * 1e3:.1f} ms per step, {args.tokens / seconds:,.0f} tok/s, "
            f"peak {peak:.2f} GiB; ours is {seconds / result['seconds']:.2f}x",
            flush=True,
        )
        row[f"peer_{dtype}_tok_s"], row[f"peer_{dtype}_gib"] = round(args.tokens / seconds), round(peak, 2)
    if args.csv:
        append(row)


if __name__ == "__main__":
    main()
