"""The table of checks: every shader, the sizes it is checked at, and its tolerance.

Errors are relative to the largest value of a result (check.error_of). float32 sums of K random terms err by about
sqrt(K) x 6e-8; a lost term or a wrong index is off by 1e-2 or more.
"""

from lorawgpu.doctor import attention, optimizer, sampling
from lorawgpu.doctor import elementwise as rows
from lorawgpu.doctor import matmul as products
from lorawgpu.doctor.check import KernelCheck
from lorawgpu.doctor.matrix_cores import matrix_product
from lorawgpu.doctor.rotary import VARIANTS, rotary
from lorawgpu.doctor.token_rows import token_columns, token_rows

EXACT = 0.0
ROUNDED = 2e-6  # a few float32 roundings, and sums of a few hundred terms
SUMMED = 1e-5  # sums of thousands of terms; exp, and the rounding of its argument
HEADS = [variant for variant in VARIANTS if variant not in ("plain", "tight")]

TABLE = (
    ("clear", rows.clear, EXACT, [(1000,)]),
    ("rmsnorm", rows.rmsnorm, ROUNDED, [(3, 123), (2, 2560), (3, 42, 0.25)]),
    ("quantize", rows.quantize, EXACT, [(3, 123), (2, 6912)]),
    ("quantize", rows.rmsnorm_quantize, ROUNDED, [("with rows", 3, 123), ("codes", 3, 123), ("codes", 2, 2560)]),
    ("rope", rotary, ROUNDED, [("plain", 5, 3, 1, 6, 2, 7), ("plain", 3, 20, 5, 128, 2, 5)]),
    ("rope_heads", rotary, ROUNDED, [(variant, 4, 3, 1, 24, 1, 4) for variant in HEADS] + [
        ("everything", 3, 3, 1, 10, 1, 5), ("everything, whole rows", 2, 20, 5, 64, 2, 5),
    ]),
    ("gate", rows.gate, ROUNDED, [
        ("silu", 3, 123), ("relu2", 3, 123), ("relu2", 2, 6912), ("gelu_tanh", 3, 123),
        ("silu", 3, 123, "packed", 0.25), ("gelu_tanh", 3, 123, "separate"),
    ]),
    ("per_layer", rows.per_layer, ROUNDED, [("bf16", 3, 10), ("f16", 3, 123), ("f32", 2, 256)]),
    ("gather", rows.gather, EXACT, [(9, 123, 2), (5, 2560, 3)]),
    ("embedding", products.embedding, EXACT, [("bf16", 123, 3, 4), ("f16", 123, 3, 4), ("f32", 2560, 3, 4)]),
    ("token_rows", token_rows, ROUNDED, [(9, 123, 1.5), (70, 16)]),
    ("token_rows", token_columns, EXACT, [(3, 123)]),
    ("dropout", rows.adapter_dropout, ROUNDED, [(3, 123), (5, 2560)]),
    ("cross_entropy", rows.cross_entropy, SUMMED, [
        ("plain", 3, 123, 2), ("plain", 3, 49152, 3), ("weighted", 3, 123, 2),
        ("plain", 3, 123, 2, 3.0), ("weighted", 3, 123, 2, 3.0),
    ]),
    ("softcap", rows.softcap, ROUNDED, [(3, 123, 30.0)]),
    ("adamw", optimizer.adamw, SUMMED, [(2, 1.0, 33000, 64, 4)]),
    ("step_state", optimizer.step_state, EXACT, [("bad",), ("good",)]),
    ("matmul", products.matmul_tiles, ROUNDED, [
        ("tall", "row", "nk", 131, 208, 512), ("medium", "row", "kn", 131, 208, 84),
        ("small", "col", "kn", 131, 208, 84), ("flat", "row", "nk", 5, 208, 84), ("skinny", "col", "kn", 131, 16, 84),
    ]),
    ("matmul", products.forward, ROUNDED, products.every_store(35, 96, 48, 16)),
    ("matmul", products.transposed, ROUNDED, products.every_store(35, 96, 48, 16)),
    ("matmul", products.matmul_int8, EXACT, [("medium", 67, 112, 2048), ("flat", 7, 112, 2576)]),
    ("matmul", products.matmul_epilogue, ROUNDED, [("f32", 37, 64, 4, 0, 20), ("int8", 37, 64, 4, 0, 20)]),
    ("matmul", products.matmul_backward, ROUNDED, [(20, 96, 48, 12)]),
    ("matrix cores", matrix_product, ROUNDED, [("bf16", "nk", 80, 144, 256), ("q8_0", "kn", 80, 160, 128)]),
    ("sum_splits", products.matmul_splits, ROUNDED, [(3, 24, 32, 1000)]),
    ("matvec", products.matvec, ROUNDED, products.every_store(3, 576, 37, 64)),
    ("matvec", products.matvec_adapters, ROUNDED, [("bf16", 1, 528, 0, 0, 8), ("ternary", 5, 2560, 0, 0, 8)]),
    ("matvec_input", products.matvec_source, SUMMED, [
        ("rows", "f32", 3, 1096), ("silu", "f32", 3, 1096), ("attention", "f32", 3, 1096), ("relu2", "int8", 3, 1096),
        ("rows", "digits", 3, 1096),
        ("gelu_tanh", "f32", 3, 1095, True, "packed", 0.25), ("gelu_tanh", "f32", 3, 1095, False, "separate"),
        ("rows", "int8", 1, 2560),
    ]),
    ("attention_chain", attention.attention, SUMMED, [("chain", 4, 1, 6, 33, 4)]),
    ("attention_chain", attention.attention_variant, SUMMED, [("chain", "all", 4, 1, 6, 33, 4)]),
    ("flash attention", attention.attention, SUMMED, [
        ("flash", 3, 1, 8, 33, 4), ("flash", 9, 3, 64, 41, 29), ("flash", 5, 5, 128, 70),
    ]),
    ("flash attention", attention.attention_variant, SUMMED, [
        ("flash", "window", 3, 1, 8, 33, 4), ("flash", "soft cap", 3, 1, 8, 33, 4),
        ("flash", "pairs", 6, 2, 64, 33, 70), ("flash", "pairs, window", 3, 1, 8, 33, 4),
    ]),
    ("attention_decode", attention.decode, SUMMED, [(9, 3, 64, 65, 64, 1), (20, 5, 128, 1, 70)]),
    ("attention_decode", attention.decode_variant, SUMMED, [
        ("window", 4, 1, 64, 65, 6), ("soft cap", 3, 1, 8, 33, 4),
    ]),
    ("sample", sampling.sample, EXACT, [("greedy", 5000), ("draw", 3001), ("draw", 50)]),
)  # fmt: skip

TOLERANCES = {record: tolerance for _, record, tolerance, _ in TABLE}
CHECKS = [KernelCheck(kernel, record, tolerance, args) for kernel, record, tolerance, sizes in TABLE for args in sizes]
