"""GPU time of each record of a plan, from timestamps around passes of one dispatch."""

from collections import defaultdict

import numpy as np
import wgpu

BATCH = 1024  # records measured between two read-backs: a query set holds 4096 stamps


def profile(plan, names: list) -> dict:
    """Seconds of GPU time by kind of record over sections `names`: {kind: (seconds, count, flops, bytes)}.

    A kind is the label without the layer: "gate_up/matmul:main". Each record runs in a pass of its own, so the total is
    above that of a plain run by the gaps between passes. Empty without timestamp queries.
    """
    device = plan.device
    if "timestamp-query" not in device.features:
        return {}
    queries = device.wgpu.create_query_set(type=wgpu.QueryType.timestamp, count=2 * BATCH)
    usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
    stamps = device.wgpu.create_buffer(size=2 * BATCH * 8, usage=usage)
    records = [r for name in names for r in plan.sections[name]]
    totals = defaultdict(lambda: [0.0, 0, 0.0, 0.0])
    for start in range(0, len(records), BATCH):
        batch = records[start : start + BATCH]
        times = _measure(device, batch, queries, stamps)
        for record, seconds in zip(batch, times, strict=True):
            kind = "/".join(part for part in record.label.split("/") if not part.startswith("layers."))
            for i, value in enumerate((seconds, 1, record.flops, record.nbytes)):
                totals[kind][i] += value
    return {kind: tuple(values) for kind, values in totals.items()}


def _measure(device, records, queries, stamps) -> np.ndarray:
    encoder = device.wgpu.create_command_encoder()
    for i, r in enumerate(records):
        writes = {"query_set": queries, "beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
        compute = encoder.begin_compute_pass(timestamp_writes=writes)
        compute.set_pipeline(r.pipeline)
        compute.set_bind_group(0, r.group)
        compute.dispatch_workgroups(*r.grid)
        compute.end()
    encoder.resolve_query_set(queries, 0, 2 * len(records), stamps, 0)
    device.queue.submit([encoder.finish()])
    ticks = np.frombuffer(device.queue.read_buffer(stamps), np.uint64)[: 2 * len(records)].reshape(-1, 2)
    return (ticks[:, 1] - ticks[:, 0]).astype(np.float64) * 1e-9  # stamps are nanoseconds
