"""Check and time each kernel at real shapes, and compare its rate with a ceiling measured on the same device.

    python scripts/bench_ops.py [--device gpu] [--shape bitnet-2b] [--tokens 4096] [--kinds rows window ...]

Ceilings: fused multiply-adds and dot4I8Packed in loops that touch no memory; torch's float32 product if torch and CUDA
are available; for row kernels, a copy. Before it is timed, each product is checked on a few rows against float64, and
each row kernel by the checks of `doctor`; a wrong result ends the run. The kind `window` compares attention with a
window of 512 keys with that of sequences of 1,024 tokens, whose rows see as many keys on average. For more on attention
see bench_attention.py, for matrix-vector products bench_generate.py.
"""

import argparse
import time

import bench_attention
import numpy as np

from lorawgpu.doctor import elementwise as rows
from lorawgpu.doctor import matmul as products
from lorawgpu.doctor import optimizer
from lorawgpu.doctor.check import KernelCheck, measure
from lorawgpu.doctor.lab import Lab
from lorawgpu.doctor.rotary import rotary
from lorawgpu.gpu import KernelCache, Plan, open_device, padded
from lorawgpu.gpu.profile import profile
from lorawgpu.ops.matmul import Operand, Problem, tiled
from lorawgpu.ops.stores import STORES
from lorawgpu.weights.synthetic import SHAPES

ROW_KERNELS = {  # (name, function of `doctor`, its sizes) for M tokens
    "bitnet-2b": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 2560)),
        ("rmsnorm + quantizer", rows.rmsnorm_quantize, ("with rows", M, 2560)),
        ("quantizer", rows.quantize, (M, 6912)),
        ("RoPE", rotary, ("plain", M, 20, 5, 128, 0, M)),
        ("relu2 gate", rows.gate, ("relu2", M, 6912)),
        ("dropout", rows.adapter_dropout, (M, 2560)),
        ("gather", rows.gather, (M, 2560, M // 2)),
        ("cross-entropy", rows.cross_entropy, ("plain", M // 8, 128256, M // 8)),
        ("AdamW", optimizer.adamw, (2, 1.0, 20_000_000)),
    ],
    "gemma-4-e2b": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 1536)),
        ("RoPE, norms of q, k, v", rotary, ("normed values", M, 8, 1, 256, 0, M)),
        ("the same, heads of 512", rotary, ("normed values", M, 8, 1, 512, 0, M)),
        ("RoPE, shared k, v", rotary, ("queries only", M, 8, 1, 256, 0, M)),
        ("GELU gate", rows.gate, ("gelu_tanh", M, 6144)),
        ("GELU gate, wide", rows.gate, ("gelu_tanh", M, 12288)),
        ("gate of per-layer input", rows.gate, ("gelu_tanh", M, 256, "separate")),
        ("per-layer input", rows.per_layer, ("bf16", M, 256)),
        ("cross-entropy, capped", rows.cross_entropy, ("plain", M // 16, 262144, M // 16, 30.0)),
        ("soft cap", rows.softcap, (M // 16, 262144, 30.0)),
    ],
    "qwen3-0.6b": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 1024)),
        ("RoPE, norms of q, k", rotary, ("normed", M, 16, 8, 128, 0, M)),
        ("silu gate", rows.gate, ("silu", M, 3072)),
        ("cross-entropy", rows.cross_entropy, ("plain", M // 8, 151936, M // 8)),
    ],
    "qwen2.5-1.5b": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 1536)),
        ("RoPE with biases", rotary, ("biased", M, 12, 2, 128, 0, M)),
        ("silu gate", rows.gate, ("silu", M, 8960)),
    ],
    "phi-4-mini": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 3072)),
        ("RoPE of part of a head", rotary, ("partial", M, 24, 8, 128, 0, M)),
        ("silu gate, fused file", rows.gate, ("silu", M, 8192, "packed")),
    ],
    "smollm2-135m": lambda M: [
        ("rmsnorm", rows.rmsnorm, (M, 576)),
        ("RoPE", rotary, ("plain", M, 9, 3, 64, 0, M)),
        ("RoPE with biases", rotary, ("biased", M, 9, 3, 64, 0, M)),
        ("RoPE with norms of heads", rotary, ("normed", M, 9, 3, 64, 0, M)),
        ("RoPE with norms of rows", rotary, ("normed rows", M, 9, 3, 64, 0, M)),
        ("silu gate", rows.gate, ("silu", M, 1536)),
        ("cross-entropy", rows.cross_entropy, ("plain", M // 4, 49152, M // 4)),
        ("AdamW", optimizer.adamw, (2, 1.0, 5_000_000)),
    ],
}
WINDOWED = {  # heads, key/value heads, head size
    "gemma-3-1b": (4, 1, 256),
    "gemma-4-e2b": (8, 1, 256),
    "olmo-3-7b": (32, 32, 128),
}
INT8 = [store.name for store in STORES.values() if store.int8_input]  # stores whose forward is bound by dot4I8Packed
TOLERANCE = 2e-5  # for sums of thousands of terms and the rounding of exp; a lost term is off by 1e-2
COPY = """
@group(0) @binding(0) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> copied: array<vec4<f32>>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var i = 0u; i < 16u; i += 1u) {
        let at = (group.x * 16u + i) * 256u + lane;
        copied[at] = source[at];
    }
}
"""


def fused(config) -> dict[str, tuple[int, int]]:
    """(out, in) of the fused projections of a model, each shape once: "qkv", or "qkv 2048" if its layers differ."""
    found = {}
    for layer in dict.fromkeys(config.layers):
        for group in layer.paths.groups():
            shapes = layer.group_shapes(group)
            shape = sum(padded(out) for out, _ in shapes), shapes[0][1]
            if shape not in found.values():
                found[f"{group} {shape[0]}" if group in found else group] = shape
    return found


FMA = "".join(f"{v} = fma({v}, x, y); " for v in "abcdefgh") * 4
DOT = "".join(f"{v} += dot4I8Packed(u32({w}), y); " for v, w in zip("abcdefgh", "bcdefgha", strict=True)) * 4
PEAK = f"""
@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;
@compute @workgroup_size(256)
fn fma_loop(@builtin(global_invocation_id) id: vec3<u32>) {{
    var a = vec4(f32(id.x)); var b = a + 1.0; var c = a + 2.0; var d = a + 3.0;
    var e = a + 4.0; var f = a + 5.0; var g = a + 6.0; var h = a + 7.0;
    let x = vec4(0.999); let y = vec4(0.5);
    for (var i = 0u; i < 256u; i += 1u) {{ {FMA} }}
    out[id.x] = a + b + c + d + e + f + g + h;
}}
@compute @workgroup_size(256)
fn dot_loop(@builtin(global_invocation_id) id: vec3<u32>) {{
    var a = i32(id.x); var b = a + 1; var c = a + 2; var d = a + 3;
    var e = a + 4; var f = a + 5; var g = a + 6; var h = a + 7;
    let y = id.x * 0x01010101u;
    for (var i = 0u; i < 256u; i += 1u) {{ {DOT} }}
    out[id.x] = vec4(f32(a + b), f32(c + d), f32(e + f), f32(g + h));
}}
"""


def seconds(device, run, budget=0.25):
    """Median seconds per `run`, from batches long enough to hide the wait."""
    run()
    device.wait()
    start = time.perf_counter()
    run()
    device.wait()
    once = max(time.perf_counter() - start, 1e-5)
    count = max(1, int(budget / 5 / once))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            run()
        device.wait()
        times.append((time.perf_counter() - start) / count)
    return float(np.median(times))


def peaks(device):
    """Rates of the arithmetic loops in operations per second."""
    groups, rates = (4096 if not device.is_cpu else 16), {}
    out = device.tensor((groups * 256, 4))
    for entry, operations in (("fma_loop", 256 * 32 * 4 * 2), ("dot_loop", 256 * 32 * 8)):
        rates[entry] = groups * 256 * operations / seconds(device, runner(device, PEAK, entry, groups, out))
    return rates


def torch_peak(m, n, k):
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 40 * m * n * k / (time.perf_counter() - start)


def require_correct(error: float, what: str) -> None:
    """SystemExit unless `error` is within rounding, because a wrong kernel's speed is meaningless. NaN is wrong."""
    if not error <= TOLERANCE:
        raise SystemExit(f"error: {what} is off by {error:.1e}, wanted at most {TOLERANCE:.0e}; it was not timed")


def case(device, kernels, kind, m, out, inner, tile=None):
    """(seconds, relative error on sampled rows) of one product. kind: the name of a store, with _t for dx = dy W.

    SystemExit if the product is wrong.
    """
    store, is_transposed, lab = kind.removesuffix("_t"), kind.endswith("_t"), Lab(Plan(device, kernels))
    weight, values = products.weight_of(device, store, inner, out)
    (part,), qscale = weight.parts, None
    if is_transposed:
        x = products.normal(m, out)
        a, b, n, k = lab.input(x), Operand(part.tensor, store=part.store), inner, out
    else:
        a, qscale, x = products.rows_for(lab, weight, m)
        b, n, k = Operand(part.tensor, store=part.store).T, out, inner
    y = device.tensor((m, n), label="y")
    problem = Problem(m, n, k, Operand(y), Operand(a), b, segments=weight.segments, qscale=qscale)
    with lab.section:
        tiled.record(lab.plan, problem, tile)
    lab.plan.run("lab")
    some = np.random.default_rng(0).integers(0, m, 4)
    expected = x[some].astype(np.float64) @ (values if is_transposed else values.T)
    got = device.read(y)[some]
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    require_correct(error, f"{kind} product of {m} x {out} x {inner}, tile {tile or 'auto'}: y")
    return seconds(device, lambda: lab.plan.run("lab")), error


def runner(device, code, entry, groups, *tensors):
    """A function that dispatches `groups` workgroups of an entry point with `tensors` at bindings 0, 1, .."""
    module = device.wgpu.create_shader_module(code=code)
    pipeline = device.wgpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": entry})
    entries = [
        {"binding": i, "resource": {"buffer": t.buffer, "offset": 0, "size": t.nbytes}} for i, t in enumerate(tensors)
    ]
    group = device.wgpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)

    def run():
        encoder = device.wgpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(groups)
        compute.end()
        device.queue.submit([encoder.finish()])

    return run


def copy_rate(device) -> float:
    """Bytes per second, read and written, of a copy."""
    size = 1 << (24 if device.is_cpu else 28)  # larger than any cache
    source, target = (device.tensor((size // 4,), label=name) for name in ("source", "target"))
    return 2 * size / seconds(device, runner(device, COPY, "main", size // 16 // 4096, source, target))


def bench_rows(device, kernels, shape, tokens):
    """Check each row kernel against its reference, then time it with timestamps."""
    copy = copy_rate(device)
    print(f"copy {copy / 1e12:.2f} TB/s")
    for name, record, sizes in ROW_KERNELS[shape](tokens):
        lab = Lab(Plan(device, kernels))
        error, worst = measure(KernelCheck(name, record, TOLERANCE, sizes), lab)
        require_correct(error, f"{name} {sizes}: {worst}")
        runs = [profile(lab.plan, lab.sections) for _ in range(5)]
        for kind in runs[0]:
            elapsed, (_, count, _, nbytes) = min(run[kind][0] for run in runs), runs[0][kind]
            rate = nbytes / elapsed
            print(
                f"{name:24} {kind:32} {elapsed / count * 1e6:9.1f} us {rate / 1e12:6.2f} TB/s {rate / copy:5.0%} "
                f"of copy  error {error:.1e}",
                flush=True,
            )


def bench_window(device, shape, tokens):
    """Check and time one sequence with a window, and sequences of twice its size without."""
    heads, kv_heads, head_dim = WINDOWED[shape]
    options = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "softcap": None}
    cases, found = {"window 512": (tokens, 512), "sequences of 1024": (1024, None)}, {}
    for name, (seq, window) in cases.items():
        args = argparse.Namespace(**options, seq=seq, window=window, impl="flash", recompute=True)
        bench = bench_attention.Bench(device, args)
        plan = bench.plan()
        errors = bench.check(plan, "forward", "backward")
        require_correct(max(errors.values()), f"attention, {shape}, {name}")
        found[name] = {section: bench.time(plan, section) for section in ("forward", "dq", "dkv", "backward")}
    for section, windowed in found["window 512"].items():
        whole = found["sequences of 1024"][section]
        print(
            f"{shape:13} {section:9} {tokens} tokens: window 512 {windowed * 1e3:8.3f} ms, sequences of 1024 "
            f"{whole * 1e3:8.3f} ms, ratio {windowed / whole:.2f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shape", default="bitnet-2b", choices=ROW_KERNELS)
    parser.add_argument("--warmup", type=float, default=4.0)
    parser.add_argument("--tiles", nargs="*", default=[None])
    parser.add_argument("--kinds", nargs="*", default=["ternary", "ternary_t", "bf16", "bf16_t", "f32", "rows"])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--window-tokens", type=int, default=16384)
    args = parser.parse_args()
    device = open_device(args.device)
    kernels = KernelCache(device)
    print(device.name, device.driver)
    end, rates = time.time() + args.warmup, peaks(device)
    while time.time() < end:
        rates = peaks(device)
    print({k: f"{v / 1e12:.1f} T" for k, v in rates.items()})
    best = torch_peak(args.tokens, 4096, 4096)
    print("torch f32", f"{best / 1e12:.1f} T" if best else "absent")
    for name, (out, inner) in fused(SHAPES[args.shape]).items():
        if args.only and name not in args.only:
            continue
        for kind in args.kinds:
            for tile in args.tiles if kind not in ("rows", "window") else []:
                elapsed, error = case(device, kernels, kind, args.tokens, out, inner, tile)
                rate = 2.0 * args.tokens * out * inner / elapsed
                peak = rates["dot_loop" if kind in INT8 else "fma_loop"]
                print(
                    f"{name:13} {kind:10} {tile or 'auto':7} {elapsed * 1e3:8.3f} ms {rate / 1e12:7.2f} T/s "
                    f"{rate / peak:5.0%} of loop  error {error:.1e}",
                    flush=True,
                )
    if "rows" in args.kinds:
        bench_rows(device, kernels, args.shape, args.tokens)
    for shape in WINDOWED if "window" in args.kinds else ():
        bench_window(device, shape, args.window_tokens)


if __name__ == "__main__":
    main()
