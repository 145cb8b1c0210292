"""Matrix products: a `Problem` says what to compute, and `kernel_for` picks the kernel, once per device and store."""

from lorawgpu.ops.matmul.choose import kernel_for, matmul
from lorawgpu.ops.matmul.problem import NEVER, NO_LORA, ROW_ALIGN, Epilogue, Form, LowRank, Operand, Problem, Segments
from lorawgpu.ops.matmul.splits import common_span, split_matmul, splits_by_length, splits_to_fill, sum_splits
from lorawgpu.ops.matmul.tuning import tuning_of

__all__ = [
    "NEVER",
    "NO_LORA",
    "ROW_ALIGN",
    "Epilogue",
    "Form",
    "LowRank",
    "Operand",
    "Problem",
    "Segments",
    "common_span",
    "kernel_for",
    "matmul",
    "split_matmul",
    "splits_by_length",
    "splits_to_fill",
    "sum_splits",
    "tuning_of",
]
