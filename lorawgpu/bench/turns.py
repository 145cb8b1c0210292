"""What is timed in turns, training steps and a float32 product in our own tiles; a step's operations."""

import re
import time

import numpy as np

from lorawgpu.gpu import Plan
from lorawgpu.gpu.profile import Clock
from lorawgpu.ops.matmul import Operand, Problem, tiled
from lorawgpu.train.step_reports import LateReader

MAX_GROUP = 8  # most steps between two waits for the GPU
GROUP_SECONDS = 1.0  # about the longest time between two waits
NEEDED = {"dq": 5 / 7, "dkv": 5 / 7}  # of the backward's products, if two are computed twice


def rounds(turns: dict, seconds: float, until: float) -> dict[str, list[float]]:
    """What each contestant's turns of about `seconds` gave; rounds go on until `until`, at least two.

    The first round does not count: GPU clocks take seconds to ramp up.
    """
    values = {name: [] for name in turns}
    count = 0
    while True:
        start = time.perf_counter()
        for name, turn in turns.items():
            values[name].append(turn(seconds))
        now, count = time.perf_counter(), count + 1
        if count > 1 and 2 * now - start > until:
            print(f"{count - 1} rounds; steps of each in ms or Gop/s: ", end="")
            print({name: [round(v * 1e3 if v < 1e6 else v / 1e9, 1) for v in found] for name, found in values.items()})
            return {name: found[1:] for name, found in values.items()}


def spread(values: list[float]) -> float:
    """How noisy samples are: the distance of the largest to the smallest, over their median."""
    return (max(values) - min(values)) / float(np.median(values))


def group_of(step_seconds: float) -> int:
    """Number of steps between two waits."""
    return max(1, min(MAX_GROUP, int(GROUP_SECONDS / step_seconds)))


class Steps:
    """Runs training steps as the trainer does: several in flight, with reports read late."""

    def __init__(self, engine, batch):
        self.engine, self.batch, self.late, self.step, self.group = engine, batch, LateReader(engine), 1, 1
        self.recording = []  # seconds that Python took to encode a step

    def turn(self, seconds: float) -> float:
        """Median seconds per step over about `seconds`.

        Encoding is timed on the first step of each group; later steps also wait for room in the queue.
        """
        rates, until = [], time.perf_counter() + seconds
        while not rates or time.perf_counter() < until:
            start = time.perf_counter()
            for i in range(self.group):
                self.step += 1
                self.engine.step([self.batch], self.step, 1e-4)
                if i == 0:
                    self.recording.append(time.perf_counter() - start)
                self.late.push(self.step)
            self.late.drain()
            rates.append((time.perf_counter() - start) / self.group)
            self.group = group_of(rates[-1])
        return float(np.median(rates))

    def idle(self) -> float:
        """The share of the time in which the GPU was idle, over a group of steps."""
        clock = Clock(self.engine.plans())
        self.turn(0)
        busy, span = clock.busy()
        return 1 - busy / span


class TileRate:
    """The rate of our tiles: a square float32 product, large enough to fill any GPU."""

    def __init__(self, device, kernels):
        self.device, self.plan = device, Plan(device, kernels)
        n = self.size = 128 if device.is_cpu else 4096
        a, w = (np.random.default_rng(i).standard_normal((n, n), np.float32) for i in (0, 1))  # zeros take less power
        a, w, y = Operand(device.upload(a)), Operand(device.upload(w)).T, Operand(device.tensor((n, n)))
        with self.plan.section("product"):
            tiled.record(self.plan, Problem(n, n, n, y, a, w))

    def turn(self, seconds: float) -> float:
        """Operations per second over about `seconds`."""
        once = self._seconds(3)
        return 2 * self.size**3 / self._seconds(max(3, int(seconds / once)))

    def _seconds(self, count: int) -> float:
        self.device.wait()
        start = time.perf_counter()
        for _ in range(count):
            self.plan.run("product")
        self.device.wait()
        return (time.perf_counter() - start) / count


def seen_keys(batch, window: int | None) -> float:
    """The number of pairs of a row and a key that it sees."""
    return float(np.minimum(batch.slot - batch.kv_start + 1, window or batch.capacity).sum())


def operations(recorded, batch, layers) -> float:
    """Operations of a step, two per multiply-add: those of matrix products, adapters included, as they are recorded,
    and those of attention that the sequences of `batch` need: the plan counts one sequence that fills all rows.
    """
    total, one_sequence = 0.0, batch.capacity * (batch.capacity + 1) / 2
    records = [record for name in recorded.sections(batch.targets) for record in recorded.plan.sections[name]]
    needed = {} if any("attention_flash_dkv_pairs" in record.label for record in records) else NEEDED
    for record in records:
        share, kernel = 1.0, re.search(r"attention_flash_(\w+):", record.label)
        if kernel:
            window = layers[int(re.search(r"layers\.(\d+)", record.label)[1])].attention.window
            most = min(one_sequence, batch.capacity * (window or batch.capacity))  # as Problem.flops counts
            share = needed.get(kernel[1], 1.0) * seen_keys(batch, window) / most
        total += share * record.flops
    return total
