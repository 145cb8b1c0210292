"""A Plan holds ordered lists of dispatches, recorded once per shape and replayed every step.

A replay creates nothing: pipelines, bind groups and uniforms are made while recording.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from lorawgpu.errors import DeviceError
from lorawgpu.gpu.kernel import KernelCache
from lorawgpu.gpu.tensor import Tensor

SLOT = 256  # bytes; WebGPU's alignment of uniform offsets
UNIFORMS = 64 << 10  # bytes of one uniform buffer
FIRST_RECORDS = 32  # of a replay's first submit; few, so that a GPU that waits starts early
RECORDS_PER_SUBMIT = 256  # of later ones, which Python encodes meanwhile


@dataclass(frozen=True)
class Record:
    """One dispatch. Submits are split by `flops`, kernels rated by `flops` and `nbytes`, the least they must move.

    For attention, `flops` is an upper bound: one sequence that fills all rows.
    """

    label: str
    pipeline: object
    group: object
    grid: tuple
    flops: float
    nbytes: float


def dispatch(compute, record: Record):
    """Encode one dispatch, bypassing wgpu-py's checks.

    The record was checked when it was made, and wgpu's own errors are raised when the encoder finishes. This halves the
    encoding time, on which a small model on a fast GPU would otherwise wait.
    """
    handle = compute._internal
    lib.wgpuComputePassEncoderSetPipeline(handle, record.pipeline._internal)
    lib.wgpuComputePassEncoderSetBindGroup(handle, 0, record.group._internal, 0, ffi.NULL)
    lib.wgpuComputePassEncoderDispatchWorkgroups(handle, *record.grid)


class Uniforms:
    """Baked Params, one 256-byte slot per distinct value."""

    def __init__(self, device):
        self.device, self.slots, self.buffer, self.used = device, {}, None, UNIFORMS

    def bake(self, data: bytes):
        data += bytes(-len(data) % 16)
        if data not in self.slots:
            if self.used + SLOT > UNIFORMS:
                usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
                self.buffer, self.used = self.device.buffer(UNIFORMS, "params", "plan", usage), 0
            self.device.queue.write_buffer(self.buffer, self.used, data)
            self.slots[data] = {"buffer": self.buffer, "offset": self.used, "size": len(data)}
            self.used += SLOT
        return self.slots[data]


class Plan:
    """Named sections of records. `with plan.section("forward"):` appends to one, `plan.run("forward")` replays it."""

    def __init__(self, device, kernels: KernelCache | None = None, flops_per_submit: float = float("inf")):
        self.device, self.kernels = device, kernels or KernelCache(device)
        self.uniforms = Uniforms(device)
        self.sections, self._current, self._scope, self._scratch = {}, None, [], {}
        self.flops_per_submit = flops_per_submit
        self.begin_pass = lambda encoder: encoder.begin_compute_pass()  # a `profile.Clock` replaces this

    def section(self, name: str) -> "_Section":
        return _Section(self, name)

    def scope(self, name: str) -> "_Scope":
        """Prefix the labels of records with `name`, so that errors and profiles name the layer."""
        return _Scope(self, name)

    def record(
        self, stem, entry, grid, *, params=None, overrides=None, template=None, flops=0.0, nbytes=None, **tensors
    ):
        """Append one dispatch of `stem:entry` over `grid` workgroups.

        `tensors` are bound by their names in the shader and must be exactly those that the entry point uses; otherwise
        ValueError. DeviceError for more workgroups or a larger binding than the device allows.
        `nbytes`: the least it must move, if not all bytes of `tensors`.
        """
        kernel = self.kernels.get(stem, entry, overrides or {}, template or {})
        label = "/".join([*self._scope, f"{stem}:{entry}"])
        grid = tuple(grid) + (1,) * (3 - len(grid))
        self._check_limits(label, grid, tensors)
        if min(grid) == 0:
            return
        resources = {n: {"buffer": t.buffer, "offset": t.offset, "size": t.nbytes} for n, t in tensors.items()}
        if params is not None:
            resources["params"] = self.uniforms.bake(kernel.pack(params))
        if unknown := resources.keys() - kernel.bindings.keys():
            raise ValueError(f"{label}: no buffer named {sorted(unknown)}; the shader has {sorted(kernel.bindings)}")
        try:
            group = self.device.wgpu.create_bind_group(
                label=label,
                layout=kernel.pipeline.get_bind_group_layout(0),
                entries=[{"binding": kernel.bindings[n], "resource": r} for n, r in resources.items()],
            )
        except Exception as e:
            raise ValueError(f"{label}: bound {sorted(resources)}: {e}") from e
        nbytes = sum(t.nbytes for t in tensors.values()) if nbytes is None else nbytes
        self.sections[self._current].append(Record(label, kernel.pipeline, group, grid, flops, nbytes))

    def _check_limits(self, label: str, grid: tuple, tensors: dict):
        device, max_binding = self.device, self.device.max_binding
        if max(grid) > (limit := device.limits["max-compute-workgroups-per-dimension"]):
            raise DeviceError(f"{label} needs {grid} workgroups; {device.name} allows {limit:,} per dimension")
        for name, tensor in tensors.items():
            if (size := tensor.nbytes) > max_binding:
                raise DeviceError(
                    f"{label} binds {name}, {size:,} bytes, at once; {device.name} allows {max_binding:,}"
                )

    def scratch(self, label: str, size: int, dtype: str = "f32") -> Tensor:
        """A tensor [size] that the next record may write and the one after it read. Later calls may get the same."""
        tensor = self._scratch.get(label)
        if tensor is None or tensor.size < size:
            tensor = self._scratch[label] = self.device.tensor((size,), dtype, label, "plan")
        return tensor

    def clear(self, tensor: Tensor):
        """Append dispatches that fill `tensor` (4-byte elements) with zeros, at most a binding each."""
        limit = self.device.max_binding // 4
        for start in range(0, tensor.size, limit):
            count = min(limit, tensor.size - start)
            groups = -(-count // 256)
            x = min(groups, 32768)
            params = {"count": count, "stride": x * 256}
            self.record("clear", "main", (x, -(-groups // x)), params=params, out=tensor.view(start, (count,)))

    def run(self, *names: str, submitted: Callable[[float], None] | None = None):
        """Replay sections in order, in submits of at most `flops_per_submit` operations and RECORDS_PER_SUBMIT records.

        submitted: called after each submit with its operations; what it raises ends the replay.
        """
        for records in self._submits(names):
            self.device.submit(self.encode(records))
            if submitted:
                submitted(sum(record.flops for record in records))

    def encode(self, records: Iterable[Record]):
        """Encode `records`, from any plans of this device, as one compute pass: the commands of one submit."""
        encoder = self.device.wgpu.create_command_encoder()
        compute = self.begin_pass(encoder)
        for record in records:
            dispatch(compute, record)
        compute.end()
        return encoder.finish()

    def _submits(self, names: Iterable[str]) -> Iterator[list[Record]]:
        """Split the records of sections into one list per submit. No list is empty."""
        records, flops, most = [], 0.0, FIRST_RECORDS
        for record in (record for name in names for record in self.sections[name]):
            if records and (flops + record.flops > self.flops_per_submit or len(records) >= most):
                yield records
                records, flops, most = [], 0.0, min(2 * most, RECORDS_PER_SUBMIT)
            records.append(record)
            flops += record.flops
        if records:
            yield records


class _Section:
    def __init__(self, plan, name):
        self.plan, self.name = plan, name

    def __enter__(self):
        self.plan.sections.setdefault(self.name, [])
        self.outer, self.plan._current = self.plan._current, self.name

    def __exit__(self, *_):
        self.plan._current = self.outer


class _Scope:
    def __init__(self, plan, name):
        self.plan, self.name = plan, name

    def __enter__(self):
        self.plan._scope.append(self.name)

    def __exit__(self, *_):
        self.plan._scope.pop()
