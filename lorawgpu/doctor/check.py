"""A check of one kernel at one size: recorded, run twice, compared with its reference."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lorawgpu.doctor.lab import Fault, Lab
from lorawgpu.errors import DeviceError
from lorawgpu.gpu import GPUError, KernelCache, Plan


@dataclass(frozen=True)
class KernelCheck:
    """`record(lab, *args)` records ops of shader `kernel` and returns a function that gives their results after the
    run: {name: (got, want)}. `tolerance` bounds `error_of` each result."""

    kernel: str
    record: Callable
    tolerance: float
    args: tuple = ()

    @property
    def shape(self) -> str:
        return ", ".join(map(str, self.args))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check. `error` is None if there was no comparison; then `fault` says why."""

    kernel: str
    shape: str
    error: float | None
    tolerance: float
    worst: str = ""  # the first wrong result, else the one with the largest error
    fault: str = ""
    seconds: float = 0.0
    ran: tuple = ()  # the shaders that the check dispatched, in order

    @property
    def ok(self) -> bool:
        return not self.fault and self.error <= self.tolerance  # false for NaN

    @property
    def suspects(self) -> str:
        """The kernel and the other shaders that ran: any of them may be the broken one."""
        others = [name for name in self.ran if name != self.kernel]
        return self.kernel + (f" (with {', '.join(others)})" if others else "")


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference relative to the largest wanted value (absolute if that is 0); infinite for NaN.

    Raises Fault if `got` is wider than `want` and that padding is not zero.
    """
    width = want.shape[-1] if want.ndim else None
    if width is not None and got[..., width:].any():
        raise Fault("the padding of a row is not zero")
    got, want = np.asarray(got[..., :width], np.float64), np.asarray(want, np.float64)
    if not want.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got - want).max() / (np.abs(want).max() or 1.0)
    return float(error) if np.isfinite(error) else float("inf")


def differing(got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A result that must be exact, whatever the tolerance of its check."""
    return ~(got == want), np.zeros(want.shape)  # a NaN differs


def measure(check: KernelCheck, lab: Lab) -> tuple[float, str]:
    """(error, name) of the first wrong result, which later ones follow from, else of the largest error."""
    with lab.section:
        results = check.record(lab, *check.args)
    lab.run()
    errors = {name: error_of(got, want) for name, (got, want) in results().items()}
    wrong = (name for name, error in errors.items() if error > check.tolerance)
    worst = next(wrong, max(errors, key=errors.get))
    return errors[worst], worst


def run_check(device, kernels: KernelCache, check: KernelCheck) -> Outcome:
    """Run a check. A broken kernel or driver does not raise: it becomes the outcome's `fault`."""
    began, plan = time.perf_counter(), Plan(device, kernels)
    error, worst, fault = None, "", ""
    try:
        error, worst = measure(check, Lab(plan))
    except (
        Fault,
        DeviceError,
        GPUError,
        ValueError,
    ) as found:  # ValueError: a shader does not have the bindings of its op
        fault = str(found).strip() or type(found).__name__
    seconds = time.perf_counter() - began
    labels = [record.label for records in plan.sections.values() for record in records]
    ran = tuple(dict.fromkeys(label.split("/")[-1].split(":")[0] for label in labels))
    return Outcome(check.kernel, check.shape, error, check.tolerance, worst, fault, seconds, ran)
