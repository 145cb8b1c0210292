"""Rates of products by kind, with the tile that was chosen beside the best of the table, and memory bandwidth."""

import time

import numpy as np

from lorawgpu.doctor.lab import Lab
from lorawgpu.doctor.matmul import normal, rows_for, weight_of
from lorawgpu.gpu import KernelCache, Plan
from lorawgpu.ops.matmul import Operand, Problem, sum_splits, tiled

KINDS = ("f32", "bf16", "ternary", "q8_0", "q4_k")  # stores of W; dx = dy W is the same with "^T"
TILES = tuple(tiled.TILES)
ROUNDS = 5
TOLERANCE = 2e-5  # of float32 sums of thousands of terms; a lost term is off by 1e-2


def median_seconds(device, run, budget: float) -> float:
    """Median seconds of a run, from ROUNDS batches long enough to hide the wait."""

    def batch(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        device.wait()
        return (time.perf_counter() - start) / count

    batch(1)
    once = max(batch(1), 1e-6)
    count = max(1, int(budget / ROUNDS / once))
    return float(np.median([batch(count) for _ in range(ROUNDS)]))


def bandwidth(device, kernels: KernelCache, budget: float = 0.25) -> float:
    """Bytes per second, read and written, of a copy of more than any cache holds."""
    count = 1 << (22 if device.is_cpu else 25)  # floats, within the guaranteed binding
    source, target = device.tensor((1, count // 4096, 4096)), device.tensor((count // 4096, 4096))
    plan = Plan(device, kernels)
    with plan.section("copy"):
        sum_splits(plan, target, source, accumulate=False)
    return 8 * count / median_seconds(device, lambda: plan.run("copy"), budget)


class Product:
    """y = x W^T in one store, or dx = dy W: (m, n, k)."""

    def __init__(self, device, kernels: KernelCache, kind: str, m: int, out: int, inner: int):
        self.device, self.kernels, self.kind = device, kernels, kind
        store, backward = kind.removesuffix("^T"), kind.endswith("^T")
        lab = Lab(Plan(device, kernels))
        weight, self.values = weight_of(device, store, inner, out)
        (part,), scales = weight.parts, None
        if backward:
            self.x, n, k = normal(m, out), inner, out
            a, b = lab.input(self.x), Operand(part.tensor, store=part.store)
        else:
            a, scales, self.x = rows_for(lab, weight, m)
            b, n, k = Operand(part.tensor, store=part.store).T, out, inner
        self.y = device.tensor((m, n), label="y")
        operands = Operand(self.y), Operand(a), b
        self.problem = Problem(m, n, k, *operands, segments=weight.segments, qscale=scales)
        self.backward = backward

    @property
    def chosen(self) -> str:
        return tiled.choose_tile(self.problem, self.device.capabilities)

    def rate(self, tile: str, budget: float) -> float:
        """Operations per second with a tile; NaN if its result is wrong."""
        plan, p = Plan(self.device, self.kernels), self.problem
        with plan.section("product"):
            tiled.record(plan, p, tile)
        plan.run("product")
        some = np.random.default_rng(0).integers(0, p.m, 4)
        want = self.x[some].astype(np.float64) @ (self.values if self.backward else self.values.T)
        got = self.device.read(self.y)[some]
        if not np.linalg.norm(got - want) <= TOLERANCE * np.linalg.norm(want):
            return float("nan")
        return 2.0 * p.m * p.n * p.k / median_seconds(self.device, lambda: plan.run("product"), budget)


def tera(rate: float) -> float:
    """In units of 1e12, to four digits."""
    return float(f"{rate / 1e12:.4g}")


def measure_products(device, kernels: KernelCache, m: int, out: int, inner: int, budget: float) -> list[dict]:
    """The rate of each kind, with the chosen tile and with the best one. `budget`: seconds of a tile."""
    found = []
    for kind in [name + way for name in KINDS for way in ("", "^T")]:
        product = Product(device, kernels, kind, m, out, inner)
        rates = {tile: product.rate(tile, budget) for tile in TILES}
        chosen, best = product.chosen, max(rates, key=lambda tile: np.nan_to_num(rates[tile]))
        found.append({
            "kind": kind, "size": [m, out, inner], "tile": chosen, "tflop_s": tera(rates[chosen]),
            "best_tile": best, "best_tflop_s": tera(rates[best]),
        })  # fmt: skip
    return found


def show_products(found: list[dict]) -> None:
    """Print a line for each kind."""
    best = f"{'best':>8} {'tile':>7} {'chosen/best':>11}"
    print(f"\n{'product':10} {'m x out x in':>18} {'TFLOP/s':>8} {'tile':>7}   {best}")
    for r in found:
        size = " x ".join(map(str, r["size"]))
        share = r["tflop_s"] / r["best_tflop_s"] if r["best_tflop_s"] else float("nan")
        line = f"{r['kind']:10} {size:>18} {r['tflop_s']:8.4g} {r['tile']:>7}"
        print(f"{line}   {r['best_tflop_s']:8.4g} {r['best_tile']:>7} {share:11.0%}")
