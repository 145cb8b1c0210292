"""`python -m lorawgpu.export --adapter A --to FORMAT --out PATH [--model M]`: export an adapter."""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from lorawgpu.cli import add_device_option, add_model_option, hint, main_of, parser_of, quoted, try_out_command
from lorawgpu.data.workers import start_worker
from lorawgpu.errors import UserError
from lorawgpu.export import gguf, gguf_merged, llama_quantize, merged, mlx, ollama, peft
from lorawgpu.export.effect import check_effect
from lorawgpu.export.ends import refuse_ends
from lorawgpu.export.gguf_tensors import TYPES
from lorawgpu.export.source import ExportSource, open_source
from lorawgpu.export.staging import file_names, staged
from lorawgpu.families.registry import FAMILIES
from lorawgpu.util.progress import busy
from lorawgpu.weights.options import parse_options

FORMATS = {"peft": peft, "gguf": gguf, "mlx": mlx, "merged": merged, "ollama": ollama}
NEED_MODEL = ("gguf", "merged", "ollama")
QUANTIZE = (*TYPES, *llama_quantize.TYPES)
GGUF_FILES = ("gguf", "ollama")  # exports of an adapter alone, or of one merged file


def parse(argv: list[str]) -> Namespace:
    parser = parser_of("export")
    parser.add_argument("--adapter", metavar="DIR", required=True, help="a PEFT adapter directory")
    parser.add_argument("--to", metavar="|".join(FORMATS), choices=FORMATS, required=True, help="the format to write")
    parser.add_argument(
        "--out", metavar="PATH", required=True, help="a new folder, or for gguf the name of a new .gguf file"
    )
    usage = "the base model: adds a check of the logits, the chat template and a sample transcript"
    parser.add_argument(
        "--model", metavar="M", help=f"{usage} (gguf, ollama and merged: defaults to the adapter's base)"
    )
    add_model_option(parser)
    known = ", ".join(name for family in FAMILIES.values() for name in family.gguf.archs)
    usage = "for gguf, where runtimes disagree: general.architecture of the base model"
    parser.add_argument("--arch", metavar="NAME", help=f"{usage} (one of {known})")
    usage = "for gguf and ollama: one file of base and adapter together, instead of an adapter"
    parser.add_argument("--merged", action="store_true", help=usage)
    usage = "with --merged: the type of all matrices (default: the base's own, where it can be written)"
    parser.add_argument("--quantize", metavar="|".join(QUANTIZE), choices=QUANTIZE, help=usage)
    usage = "measure what the export does to the loss on this held-out data, in any format of `datasets`"
    parser.add_argument("--data", metavar="FILE", help=usage)
    parser.add_argument("--system", metavar="TEXT", help="for ollama: the system message of the Modelfile")
    usage = "for merged: write a quantized model's weights as float32, or a ternary one's as bf16, for evaluation only"
    parser.add_argument("--dequantize", action="store_true", help=usage)
    add_device_option(parser)
    args = parser.parse_args(argv)
    if args.arch is not None and args.to not in GGUF_FILES:
        raise UserError(f"--arch {args.arch}: only --to gguf and ollama take an architecture")
    if args.merged and args.to not in GGUF_FILES:
        raise UserError(f"--merged: only --to gguf and ollama have two forms; --to {args.to} is one")
    if args.quantize and not args.merged and args.to != "ollama":
        raise UserError(f"--quantize {args.quantize}: only --to gguf --merged and ollama write weights of the base")
    if args.system is not None and args.to != "ollama":
        raise UserError("--system: only --to ollama writes a Modelfile, which can hold one")
    if args.system and '"""' in args.system:
        raise UserError('--system: a Modelfile cannot hold a text with """; write it in another way')
    if args.dequantize and args.to != "merged":
        raise UserError("--dequantize: only --to merged writes base weights")
    return args


def run(argv: list[str]) -> None:
    args = parse(argv)
    if args.data is not None:
        start_worker()
    needs_model = args.to in NEED_MODEL or args.data is not None
    source = open_source(args.adapter, args.model, needs_model, parse_options(args.model_option))
    out, form = Path(args.out), FORMATS[args.to]
    if args.to == "merged":
        merged.check_mergeable(source, args.dequantize)
    if args.to == "ollama":
        args.merged = ollama.is_merged(source, args.merged or args.quantize is not None)
    if args.to in GGUF_FILES:
        form = gguf_merged if args.merged else gguf
    if form in (gguf, mlx):
        refuse_ends(source, "Ollama" if args.to == "ollama" else form.RUNTIME)
    if args.merged:
        gguf_merged.check(source)
    if args.quantize in llama_quantize.TYPES:
        rest = ["--adapter", args.adapter, *(["--model", args.model] if args.model else [])]
        llama_quantize.require(args.quantize, out, args.to, rest)
    held_out = read_data(source, args) if args.data is not None else None
    main_file = form.FILE if args.to == "gguf" and out.suffix == ".gguf" else None
    with staged(out, main_file) as folder:
        notes = write(folder, source, form, args, held_out)
        if args.to == "ollama":
            notes += ollama.write_modelfile(folder, source, args.merged, args.system)
        written = sorted(path.name for path in folder.iterdir())
    targets = file_names(out, written, main_file) if main_file else {name: out / name for name in written}
    kind = merged.description(source) if form is merged else f"merged {args.to}" if args.merged else args.to
    print(f"wrote {kind}: {', '.join(map(str, targets.values()))}")
    for line in notes:
        print(f"  {line}")
    remarks = form.remarks(source)
    if remarks:
        problems = form not in (merged, gguf_merged)
        print(f"known problems of {form.RUNTIME} with this adapter:" if problems else "notes:")
    for remark in remarks:
        print(f"  - {remark}")
    hint(command_for(form, out, targets, source))


def command_for(form, out: Path, targets: dict[str, Path], source: ExportSource) -> str:
    """How to run an export."""
    if form is ollama:
        return ollama.next_command(out)
    file = next((path for path in targets.values() if path.suffix == ".gguf"), out)
    if form is gguf_merged:
        return quoted("llama-cli", "-m", file)
    if form is gguf:
        return quoted("llama-cli", "-m", "BASE.gguf", "--lora", file)
    if form is mlx:
        return quoted(
            "mlx_lm.generate", "--model", source.base_name or "BASE", "--adapter-path", out, "--prompt", "..."
        )
    if form is merged:
        return quoted("lorawgpu", "generate", "--model", out, "--prompt", "...")
    return try_out_command(out)


def read_data(source: ExportSource, args: Namespace):
    """The held-out data, before anything is written. UserError if they cannot be read, or no loss can be measured."""
    from lorawgpu.train.held_out import evaluation_config, read_held_out  # exports without a model need no wgpu

    if source.config.ternary and args.to == "merged":
        raise UserError("--data: dequantized ternary weights are another model, which is not run here; remove --data")
    model = args.model or source.base_name
    return read_held_out(evaluation_config(args.data, model, source.checkpoint, args.adapter), source.checkpoint)


def write(folder: Path, source: ExportSource, form, args: Namespace, held_out) -> list[str]:
    """Write an export into `folder` and check it; returns what to say of it."""
    on_device = partial(with_device, folder, source, args.device, held_out)
    if form is gguf_merged:
        return write_merged_gguf(folder, source, args, on_device)
    with busy(f"writing {args.to}"):
        if form is gguf:
            gguf.write(folder, source, args.arch)
        else:
            form.write(folder, source)
    if form is merged:
        return check_merged(folder, source, on_device)
    return check_adapter(folder, source, form, args.out, on_device)


def write_merged_gguf(folder: Path, source: ExportSource, args: Namespace, on_device) -> list[str]:
    theirs = args.quantize in llama_quantize.TYPES
    kind = "f16" if theirs else args.quantize
    with busy("writing merged weights"):
        gguf_merged.write(folder, source, kind, args.arch)
    with busy("reading back"):
        note, checkpoint = gguf_merged.check_file(folder, source, kind)
    if theirs:
        with busy(f"llama.cpp is writing {args.quantize}"):
            llama_quantize.quantize(checkpoint.path, args.quantize)
        with busy("reading back"):
            note, checkpoint = llama_quantize.check_file(folder, source)
    size = gguf_merged.size_note(folder, source, args.quantize)
    return [size, note, *on_device(lambda probe: probe.rounded(checkpoint))]


def check_adapter(folder: Path, source: ExportSource, form, out: str, on_device) -> list[str]:
    """Read an exported adapter back and compare it with ours: its matrices, and with a model also the logits."""
    with busy("reading back"):
        effect = form.read(folder, source)
        worst = check_effect(source.effect, effect, out)
    notes = [f"read back: {len(effect)} linear layers change as with our adapter, within {worst:.1e}"]
    if source.checkpoint is None:
        return [*notes, "without --model: logits not compared, no chat template, no sample transcript"]
    return notes + on_device(lambda probe: probe.adapter(effect))


def check_merged(folder: Path, source: ExportSource, on_device) -> list[str]:
    """Read merged weights back and compare them with base and adapter; logits only if it is the same model."""
    with busy("reading back"):
        notes = [f"read back: {merged.check(folder, source)}"]
    if source.config.ternary:
        text = "logits not compared: without int8 activations this is a different model"
        return [*notes, *on_device(lambda probe: [text])]
    checkpoint = merged.reopen(folder, source)
    return notes + on_device(lambda probe: probe.merged(checkpoint))


def with_device(folder: Path, source: ExportSource, device: str | None, held_out, judge) -> list[str]:
    """The result of `judge(probe)` on the device, and a note if the sample transcript was not written."""
    from lorawgpu.export.probe import Probe
    from lorawgpu.export.sample import write_sample
    from lorawgpu.gpu import device_errors, open_device

    with device_errors():
        opened = open_device(device)
        with busy("computing logits with and without the adapter"):
            probe = Probe(source, opened, held_out=held_out)
        with busy("computing the export's logits"):
            notes = judge(probe)
        with busy("answering for the sample transcript"):
            notes = [*notes, write_sample(folder, source, probe)]
    return [note for note in notes if note]


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
