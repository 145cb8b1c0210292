"""Check and time attention at one shape: scripts/bench_attention.py --seq 2048 --head-dim 128 [--window 512] [--sweep].

`needed` TFLOP/s count what causal attention needs (4 HD flops per visible pair forward, 10 backward); `executed` also
counts what the two-pass backward recomputes (14). --sweep times every tile in CANDIDATES, kernel by kernel.
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import numpy as np

from lorawgpu.gpu import KernelCache, Plan, open_device, padded
from lorawgpu.ops import attention_flash
from lorawgpu.ops.attention import attention_backward, attention_forward, log_sum_exp
from lorawgpu.ops.attention_flash import Tile
from lorawgpu.reference import attention as reference

CANDIDATES = {
    128: {
        "forward": [Tile(8, 16, 8, 4, 4), Tile(4, 16, 8, 4, 4), Tile(8, 16, 4, 8, 4), Tile(8, 16, 8, 8, 4)],
        "dq": [Tile(8, 16, 8, 4, 4), Tile(4, 16, 8, 4, 4), Tile(8, 16, 4, 4, 4), Tile(8, 16, 4, 8, 4)],
        "dkv": [Tile(8, 16, 4, 8, 4), Tile(4, 16, 4, 8, 4), Tile(8, 16, 4, 4, 4), Tile(4, 16, 8, 4, 4)],
    },
    64: {
        "forward": [Tile(8, 16, 4, 4, 8), Tile(16, 8, 8, 8, 4), Tile(8, 8, 8, 4, 4), Tile(8, 16, 8, 4, 4)],
        "dq": [Tile(8, 8, 8, 4, 4), Tile(16, 8, 8, 4, 4), Tile(8, 8, 8, 8, 4), Tile(8, 8, 4, 8, 4)],
        "dkv": [Tile(8, 8, 8, 4, 4), Tile(16, 8, 4, 8, 4), Tile(8, 8, 4, 8, 4), Tile(8, 16, 8, 4, 4)],
    },
}
NEEDED = {"forward": 4, "backward": 10, "both": 14}
EXECUTED = {"forward": 4, "dq": 6, "dkv": 8, "dkv_pairs": 4}
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = 1e-4  # float32 sums over a few thousand tokens
MOST_CHECKED = 4096  # rows of a sequence, for which the reference stores whole score matrices


class Scratch(dict):
    """Scratch tensors by shape and label, each created once."""

    def __init__(self, device):
        self.device = device

    def take(self, shape, dtype, label):
        key = shape, label
        if key not in self:
            self[key] = self.device.tensor(shape, dtype, label)
        return self[key]

    def give(self, *tensors):
        pass

    def reuse_only(self):
        return nullcontext()


class Bench:
    """Random tensors of one shape on the device, and plans over them."""

    def __init__(self, device, args):
        self.device, self.args, self.kernels, self.scratch = device, args, KernelCache(device), Scratch(device)
        rng = np.random.default_rng(0)
        row, slot = padded(args.heads * args.head_dim), padded(args.kv_heads * args.head_dim)
        self.host, self.gpu = {}, {}
        for name, width, logical in (
            ("q", row, args.heads),
            ("dout", row, args.heads),
            ("k", slot, args.kv_heads),
            ("v", slot, args.kv_heads),
        ):
            x = np.zeros((args.tokens, width), np.float32)
            x[:, : logical * args.head_dim] = rng.standard_normal((args.tokens, logical * args.head_dim))
            self.host[name], self.gpu[name] = x, device.upload(x, label=name)
        t = np.arange(args.tokens, dtype=np.uint32)
        self.host["slot"], self.host["kv_start"] = t, t // args.seq * args.seq
        self.host["segment_end"] = np.minimum(self.host["kv_start"] + args.seq, args.tokens).astype(np.uint32)
        for name in ("slot", "kv_start", "segment_end"):
            self.gpu[name] = device.upload(self.host[name], label=name)
        for name, shape in {
            "out": (args.tokens, row),
            "lse": (args.tokens, 2 * args.heads),
            "dq": (args.tokens, row),
            "dk": (args.tokens, slot),
            "dv": (args.tokens, slot),
        }.items():
            self.gpu[name] = device.tensor(shape, "f32", name)
        lengths = np.diff([*range(0, args.tokens, args.seq), args.tokens]).astype(float)
        seen = np.minimum(lengths, args.window or args.seq)  # by the last row
        pairs = (lengths - seen) * seen + seen * (seen + 1) / 2
        self.unit = pairs.sum() * args.heads * args.head_dim  # multiply-adds per product

    def plan(self) -> Plan:
        plan, g, a = Plan(self.device, self.kernels), self.gpu, self.args
        common = [g["q"], g["k"], g["v"], g["slot"], g["kv_start"]]
        options = {
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "scale": a.head_dim**-0.5,
            "window": a.window,
            "softcap": a.softcap,
            "impl": a.impl,
            "workspace": self.scratch,
        }
        more = options | {"longest": a.seq, "room": 0 if a.recompute else self.device.max_binding // 4}
        with plan.section("forward"):
            attention_forward(plan, g["out"], g["lse"], *common, **options)
        with plan.section("backward"):
            attention_backward(
                plan, g["dq"], g["dk"], g["dv"], g["dout"], g["out"], g["lse"], *common, g["segment_end"], **more
            )
        for r in plan.sections["backward"]:
            name = r.label.split(":")[0].removeprefix("attention_").removeprefix("flash_")
            plan.sections.setdefault(name, []).append(r)
        return plan

    def check(self, plan, *sections):
        """Run the plan. Returns {output: max error / max value}, for the first key/value head.

        Of the first sequence, at most MOST_CHECKED rows; keys whose rows are not all among them are left out.
        """
        for name in OUTPUTS:  # so that a previous tile's results cannot pass for this one's
            self.device.write(self.gpu[name], np.full(self.gpu[name].shape, np.nan, np.float32))
        plan.run(*sections)
        a, group = self.args, self.args.heads // self.args.kv_heads
        length, wide, one = min(a.seq, a.tokens), group * a.head_dim, a.head_dim
        rows = min(length, MOST_CHECKED)
        keys = rows if rows == length else max(rows - (a.window or length), 0)
        host = {n: x[:rows] for n, x in self.host.items()}
        q, dout, k, v = (host[n][:, :w].astype(float) for n, w in (("q", wide), ("dout", wide), ("k", one), ("v", one)))
        if not hasattr(self, "want"):
            sizes = host["slot"], host["kv_start"], group, 1, one**-0.5, a.window, a.softcap
            out, lse = reference.attention_forward(q, k, v, *sizes)
            dq, dk, dv = reference.attention_backward(dout, q, k, v, out, lse, *sizes)
            self.want = {"out": out, "lse": lse.T, "dq": dq, "dk": dk[:keys], "dv": dv[:keys]}
        errors = {}
        for name in OUTPUTS:
            want = self.want[name]
            got = self.device.read(self.gpu[name])[: len(want)]
            got = (log_sum_exp(got) if name == "lse" else got)[:, : want.shape[1]]
            errors[name] = float(np.abs(got - want).max() / np.abs(want).max()) if want.size else 0.0
        return errors

    def time(self, plan, section, seconds=0.3, repeats=5):
        """Median seconds per run of `section`, from batches of about `seconds` each."""

        def batch(n):
            begin = time.perf_counter()
            plan.run(*[section] * n)
            self.device.wait()
            return (time.perf_counter() - begin) / n

        batch(1)
        n = max(1, int(seconds / batch(3)))
        return statistics.median(batch(n) for _ in range(repeats))


def show(bench, name, seconds, note=""):
    rates = [
        f"{count[name] * bench.unit / seconds / 1e12:8.3f}" if count.get(name) else " " * 8
        for count in (NEEDED, EXECUTED)
    ]
    print(f"{name:10} {seconds * 1e3:9.3f} ms {rates[0]} {rates[1]} TFLOP/s  {note}", flush=True)


def sweep(bench):
    """Time every candidate, those that unroll most, and so compile longest, last."""
    table = CANDIDATES[64 if bench.args.head_dim <= 64 else 128]
    pairs = [(kernel, tile) for kernel, tiles in table.items() for tile in tiles]
    for kernel, tile in sorted(pairs, key=lambda p: p[1].rt * p[1].ct):
        saved, attention_flash.TILES[kernel] = attention_flash.TILES[kernel], {512: tile}
        try:
            try_tile(bench, kernel, tile)
        except Exception as e:  # a tile may not fit this device; continue with the others
            print(f"{kernel:10} {tuple(tile)}: {e}", flush=True)
        attention_flash.TILES[kernel] = saved


def try_tile(bench, kernel, tile):
    begin = time.perf_counter()
    plan = bench.plan()
    plan.run(kernel)
    bench.device.wait()
    compiled = time.perf_counter() - begin
    error = float(np.max([*bench.check(plan, "forward", "backward").values()]))  # np.max propagates NaN
    wrong = "" if error <= TOLERANCE else " WRONG"
    show(bench, kernel, bench.time(plan, kernel), f"{tuple(tile)} first run {compiled:.1f} s, error {error:.0e}{wrong}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("seq", 2048), ("heads", 20), ("kv-heads", 5), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, default=None, help="keys that a row sees at most")
    parser.add_argument("--softcap", type=float, default=None)
    parser.add_argument("--impl", default="flash", choices=("flash", "chain"))
    parser.add_argument("--recompute", action="store_true", help="leave no scratch for pairs of weights")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warmup", type=float, default=4.0, help="seconds")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    device = open_device(args.device)
    bench = Bench(device, args)
    plan = bench.plan()
    print(
        f"{device.name} {device.driver}\n{args.tokens} tokens in sequences of {args.seq}, heads {args.heads}/"
        f"{args.kv_heads} of {args.head_dim}, {args.impl}"
    )
    errors = bench.check(plan, "forward", "backward")
    print("error  " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    begin = time.perf_counter()
    while time.perf_counter() - begin < args.warmup:
        plan.run("forward", "backward")
        device.wait()
    print(f"{'':10} {'':12} {'needed':>8} {'executed':>8}")
    seconds = {name: bench.time(plan, name) for name in plan.sections}
    for name in seconds:
        show(bench, name, seconds[name])
    both = seconds["forward"] + seconds["backward"]
    show(bench, "both", both)
    if args.sweep:
        sweep(bench)
    if not all(e <= TOLERANCE for e in errors.values()):
        raise SystemExit("WRONG: an error exceeds the tolerance")


if __name__ == "__main__":
    main()
