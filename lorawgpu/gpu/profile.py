"""GPU time from timestamps: for each record of a plan, and how long the GPU was busy while plans ran."""

from collections import defaultdict

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import lib

BATCH = 1024  # records measured per readback; a query set holds 4096 timestamps


def profile(plan, names: list) -> dict:
    """GPU time of the sections `names` by kind of record: {kind: (seconds, count, flops, bytes)}.

    A kind is the label without the layer: "gate_up/matmul:main". Each record runs in a pass of its own, so the total
    exceeds that of a normal run by the gaps between passes. Empty if the device has no timestamp queries.
    """
    device = plan.device
    if "timestamp-query" not in device.capabilities.features:
        return {}
    stamps = _Stamps(device)
    records = [r for name in names for r in plan.sections[name]]
    totals = defaultdict(lambda: [0.0, 0, 0.0, 0.0])
    for start in range(0, len(records), BATCH):
        batch = records[start : start + BATCH]
        times = _measure(device, batch, stamps)
        for record, seconds in zip(batch, times, strict=True):
            kind = "/".join(part for part in record.label.split("/") if not part.startswith("layers."))
            for i, value in enumerate((seconds, 1, record.flops, record.nbytes)):
                totals[kind][i] += value
    return {kind: tuple(values) for kind, values in totals.items()}


class _Stamps:
    """Pairs of timestamps around up to BATCH passes."""

    def __init__(self, device):
        self.device = device
        self.queries = device.wgpu.create_query_set(type=wgpu.QueryType.timestamp, count=2 * BATCH)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self.buffer = device.wgpu.create_buffer(size=2 * BATCH * 8, usage=usage)

    def begin_pass(self, encoder, i: int):
        """A compute pass that writes its begin and end as the i-th pair."""
        writes = {"beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
        return encoder.begin_compute_pass(timestamp_writes={"query_set": self.queries, **writes})

    def read(self, count: int) -> np.ndarray:
        """Begin and end of the first `count` passes in seconds since the first began: float64 [count, 2]. Waits."""
        encoder = self.device.wgpu.create_command_encoder()
        encoder.resolve_query_set(self.queries, 0, 2 * count, self.buffer, 0)
        self.device.queue.submit([encoder.finish()])
        ticks = np.frombuffer(self.device.queue.read_buffer(self.buffer), np.uint64)[: 2 * count].astype(np.int64)
        period = lib.wgpuQueueGetTimestampPeriod(self.device.queue._internal)  # nanoseconds per tick, not always 1
        return (ticks - ticks[:1]).reshape(-1, 2) * (period * 1e-9)


class Clock:
    """Measures how long the GPU is busy with passes of `plans`, at most BATCH passes, until `busy` is called.

    ValueError if the device has no timestamp queries.
    """

    def __init__(self, plans: list):
        device = plans[0].device
        if "timestamp-query" not in device.capabilities.features:
            raise ValueError(f"{device.name} has no timestamp queries")
        self.plans, self.count, self._stamps = plans, 0, _Stamps(device)
        self._outer = [plan.begin_pass for plan in plans]
        for plan in plans:
            plan.begin_pass = self._begin_pass

    def _begin_pass(self, encoder):
        self.count += 1
        return self._stamps.begin_pass(encoder, self.count - 1)

    def busy(self) -> tuple[float, float]:
        """(seconds the GPU was busy, seconds from the first pass to the end of the last). Ends the measurement."""
        for plan, outer in zip(self.plans, self._outer, strict=True):
            plan.begin_pass = outer
        spans = self._stamps.read(self.count)
        ends = np.maximum.accumulate(spans[:, 1])
        idle = np.maximum(spans[1:, 0] - ends[:-1], 0).sum()
        total = ends[-1] - spans[0, 0]
        return total - idle, total


def _measure(device, records, stamps: _Stamps) -> np.ndarray:
    encoder = device.wgpu.create_command_encoder()
    for i, r in enumerate(records):
        compute = stamps.begin_pass(encoder, i)
        compute.set_pipeline(r.pipeline)
        compute.set_bind_group(0, r.group)
        compute.dispatch_workgroups(*r.grid)
        compute.end()
    device.queue.submit([encoder.finish()])
    return np.diff(stamps.read(len(records)))[:, 0]
