"""`lorawgpu bench`: memory bandwidth, products by kind, training steps at published shapes, and a line to send in."""

import sys
from pathlib import Path

from lorawgpu import __version__
from lorawgpu.bench.products import bandwidth, measure_products, show_products
from lorawgpu.bench.report import compared, line_of, read_report
from lorawgpu.bench.training import RANK, SEQ, TOKENS, BenchSettings, measure_shape, needed_bytes, show_table
from lorawgpu.cli import add_device_option, main_of, parser_of
from lorawgpu.doctor.system import free_memory
from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu import Device, KernelCache, device_errors, open_device
from lorawgpu.ops.matmul import tuning_of
from lorawgpu.ops.matmul.tuning import line_of as tuning_line
from lorawgpu.weights.synthetic import DENSE_STORES, SHAPES

# By size: without --shape those are measured that fit.
LADDER = ("smollm2-135m", "smollm2-360m", "qwen3-0.6b", "tinyllama-1.1b", "llama-3.2-1b", "bitnet-2b")
PRODUCT = (4096, 2048, 2048)  # rows, outputs, terms
SOFTWARE = {"shapes": ("tiny",), "tokens": 256, "seq": 128, "product": (64, 256, 256)}  # on a software adapter
STORE = "bf16"
ROOM = 0.9  # the share of free memory that a shape may take


def add_options(parser) -> None:
    add, cpu = parser.add_argument, SOFTWARE
    fitting = f"published models: {', '.join(SHAPES)} (default: those of {', '.join(LADDER)} that fit)"
    add("--shape", choices=SHAPES, nargs="+", metavar="NAME", help=fitting)
    add("--tokens", type=int, help=f"tokens of a step (default {TOKENS}, on a CPU {cpu['tokens']})")
    add("--seq", type=int, help=f"tokens of a sequence (default {SEQ}, on a CPU {cpu['seq']})")
    add("--rank", type=int, default=RANK, help=f"lora_r (default {RANK})")
    add("--store", choices=DENSE_STORES, nargs="+", default=[STORE], help="how dense weights are stored")
    add("--checkpointing", action="store_true", help="compute activations again, to save memory")
    add("--seconds", type=float, default=30.0, help="time for a shape, setup included (default 30)")
    add("--turn", type=float, default=2.0, help="about the seconds of one turn (default 2)")
    add("--profile", action="store_true", help="also GPU time and rates by kind of kernel")
    add("--compare", metavar="FILE", type=Path, help="a file with the line of another run")
    add_device_option(parser)


def settings_of(args, device: Device) -> BenchSettings:
    """UserError for sizes that make no step."""
    defaults = (SOFTWARE["tokens"], SOFTWARE["seq"]) if device.is_cpu else (TOKENS, SEQ)
    given = args.tokens, args.seq
    tokens, seq = (default if value is None else value for value, default in zip(given, defaults, strict=True))
    for name, value in (("--tokens", tokens), ("--seq", seq), ("--rank", args.rank)):
        if value < 1:
            raise UserError(f"{name} {value}: wanted a whole number above 0")
    if tokens % min(seq, tokens):
        raise UserError(f"--tokens {tokens}: wanted a multiple of --seq {seq}, so that all sequences are whole")
    sizes = {"tokens": tokens, "seq": min(seq, tokens), "rank": args.rank, "checkpointing": args.checkpointing}
    return BenchSettings(**sizes, device=args.device, seconds=args.seconds, turn=args.turn)


def shapes_that_fit(settings: BenchSettings, device: Device, stores: list[str]) -> list[str]:
    """The default shapes whose plan fits into free memory, if that is known, and into the device's buffers."""
    if device.is_cpu:
        return list(SOFTWARE["shapes"])
    free, found = free_memory(), []
    for name in LADDER:
        try:
            needed = sum(needed_bytes(settings, name, store) for store in stores)
        except DeviceError as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        if free is not None and needed > ROOM * free:
            print(f"{name} is left out: it needs {needed / 2**30:.1f} GiB of {free / 2**30:.1f} that are free")
        else:
            found.append(name)
    return found


def trainings(settings: BenchSettings, shapes: list[str], args) -> list[dict]:
    """What was measured of each shape and store. Without --shape, one that does not fit ends the ladder."""
    records = []
    for name in shapes:
        print(f"== {name}", flush=True)
        try:
            records += measure_shape(settings, name, args.store, profiled=args.profile)
        except DeviceError as error:
            if args.shape or "out of GPU memory" not in str(error):
                raise
            print(f"{name} and larger shapes are left out: {str(error).splitlines()[0]}")
            break
    return records


def run(argv: list[str]) -> None:
    parser = parser_of("bench")
    add_options(parser)
    args = parser.parse_args(argv)
    theirs = read_report(args.compare) if args.compare else None
    device = open_device(args.device)
    settings = settings_of(args, device)
    print(f"{device.name}, driver {device.driver}: {device.reason}")
    kernels, line = KernelCache(device), tuning_line(device.capabilities)
    print(f"tuning: {tuning_of(device.capabilities)}, {line.why}")
    with device_errors():
        copy = bandwidth(device, kernels)
        print(f"copy: {copy / 1e9:.1f} GB/s, read and written", flush=True)
        size = SOFTWARE["product"] if device.is_cpu else PRODUCT
        products = measure_products(device, kernels, *size, budget=min(0.25, args.turn))
        show_products(products)
        measured = trainings(settings, args.shape or shapes_that_fit(settings, device, args.store), args)
    show_table(settings, measured)
    for r in measured:
        print(f"{r['shape']} {r['store']}: {r['samples']} samples, apart by {r['spread']:.1%} of their median")
    report = {
        "version": __version__, "adapter": device.name, "driver": device.driver, "lanes": device.capabilities.lanes,
        "copy_gb_s": round(copy / 1e9, 2), "products": products, "trainings": measured,
    }  # fmt: skip
    for text in compared(report, theirs) if theirs else []:
        print(text)
    print("\nplease send us this line:")
    print(line_of(report))


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
