"""A test bench for kernels: padded inputs, poisoned outputs between guards, and repeated runs."""

from contextlib import nullcontext

import numpy as np

from lorawgpu.gpu import padded

POISON = 777.0
GUARD = 64  # elements before and after an output: 256 bytes, the alignment of binding offsets
SPARE_ROWS = 2  # rows past the end inside the binding: only the kernel's own bounds check protects them
NAN_BITS = 0x7FC00000


class Fault(AssertionError):
    """A kernel wrote where it must not, or gave different bits in the second run."""


def normal(*shape, seed=0):
    """Standard normal float32, determined by shape and seed."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def pad(array):
    """Append zero columns up to the padded row stride."""
    return np.pad(array, ((0, 0), (0, padded(array.shape[1]) - array.shape[1])))


class Output:
    """A tensor that kernels write to, inside a larger poisoned buffer."""

    def __init__(self, device, initial, dtype, label):
        self.device, self.shape = device, initial.shape
        spare = np.full((SPARE_ROWS, *initial.shape[1:]), POISON).astype(initial.dtype)
        body = np.concatenate([initial, spare])
        guard = np.full(GUARD, POISON).astype(initial.dtype)
        self.initial = np.concatenate([guard, body.ravel(), guard])
        self.whole = device.upload(self.initial, dtype, label)
        self.tensor = self.whole.view(GUARD, body.shape)

    @property
    def exact(self):
        """The tensor without its spare rows, for ops that read their sizes from it."""
        return self.whole.view(GUARD, self.shape)

    def reset(self):
        self.device.write(self.whole, self.initial)

    def fetch(self):
        """Read back. Raises Fault if guards or spare rows changed."""
        whole = self.device.read(self.whole)
        size = int(np.prod(self.shape))
        outside = np.r_[0:GUARD, GUARD + size : len(whole)]
        if not np.array_equal(whole[outside], self.initial[outside]):
            raise Fault(f"{self.whole.label}: wrote outside its output")
        self.value = whole[GUARD : GUARD + size].reshape(self.shape)


class Lab:
    """Inputs and outputs of ops recorded on `plan`; `run` runs the ops in one submit, twice, and compares bits."""

    def __init__(self, plan):
        self.plan, self.device, self.outputs = plan, plan.device, []
        self.section = plan.section("lab")
        self.sections = ["lab"]  # replayed by `run`; an op with its own sections sets them here

    def input(self, array, dtype=None, label="input"):
        return self.device.upload(np.ascontiguousarray(array), dtype, label)

    def padded(self, array, label="input"):
        return self.input(pad(array), None, label)

    def output(self, *shape, initial=None, dtype="f32", label="output"):
        """A poisoned output, unless `initial` gives its contents: `.tensor` to bind, `.value` after `run`."""
        numpy_dtype = {"f32": np.float32, "u32": np.uint32, "i32": np.int32}[dtype]
        array = np.full(shape, POISON, numpy_dtype) if initial is None else np.ascontiguousarray(initial, numpy_dtype)
        self.outputs.append(Output(self.device, array, dtype, label))
        return self.outputs[-1]

    def rows(self, rows, width, initial=None, label="output"):
        """An output of `rows` rows, padded to the row stride."""
        return self.output(rows, padded(width), initial=initial, label=label)

    def state(self):
        return self.output(16, initial=np.zeros(16), dtype="u32", label="state")

    def run(self):
        runs = []
        for _ in range(2):
            for out in self.outputs:
                out.reset()
            self.plan.run(*self.sections)
            for out in self.outputs:
                out.fetch()
            runs.append([out.value.tobytes() for out in self.outputs])
        if runs[0] != runs[1]:
            raise Fault("two runs of the same plan gave different results")


class NanScratch:
    """A workspace whose scratch is NaN, to catch kernels that read what they did not write."""

    def __init__(self, device):
        self.device = device

    def take(self, shape, dtype="f32", label=""):
        tensor = self.device.tensor(shape, dtype, label)
        bits = np.full(tensor.size, NAN_BITS, np.uint32)
        self.device.write(tensor, bits.view(np.float32) if dtype == "f32" else bits)
        return tensor

    def give(self, *tensors):
        pass

    def reuse_only(self):
        return nullcontext()
