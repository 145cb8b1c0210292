"""`python -m lorawgpu.evaluate --model M [--adapter A] --data FILE`: the loss on a file, as one JSON line."""

import json
import math
import sys
from argparse import Namespace

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.cli import (
    START,
    add_device_option,
    add_model_options,
    add_template_kwargs_option,
    hint,
    main_of,
    parser_of,
    try_out_command,
)
from lorawgpu.config.model_options import kept_options
from lorawgpu.config.schema import TrainConfig
from lorawgpu.config.types import MAX_COUNT
from lorawgpu.data.preview import summary
from lorawgpu.data.workers import start_worker
from lorawgpu.engine.readings import settled
from lorawgpu.errors import UserError
from lorawgpu.gpu import device_errors, open_device
from lorawgpu.lora.base_name import base_for, note_other_base
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.train.held_out import evaluation_config, read_held_out
from lorawgpu.util.progress import busy, progress
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.extended import extended_for
from lorawgpu.weights.gguf_checkpoint import lost_window
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.options import parse_options


def parse(argv: list[str]) -> Namespace:
    parser = parser_of("evaluate")
    add_model_options(parser)
    parser.add_argument(
        "--data", metavar="FILE", required=True, help="the data to evaluate on, in any format of `datasets`"
    )
    usage = "truncate longer samples to N tokens (default: the model's context)"
    parser.add_argument("--sequence-len", metavar="N", type=int, help=usage)
    usage = f"one of {', '.join(BUILT_IN)}, a Jinja file or source (default: the adapter's, else the model's)"
    parser.add_argument("--chat-template", metavar="T", help=usage)
    add_template_kwargs_option(parser)
    add_device_option(parser)
    args = parser.parse_args(argv)
    if args.sequence_len is not None and not 2 <= args.sequence_len <= MAX_COUNT:
        raise UserError(f"--sequence-len {args.sequence_len}: wanted at least 2 tokens and at most {MAX_COUNT}")
    return args


def config_of(args: Namespace, checkpoint: Checkpoint) -> TrainConfig:
    more = (args.sequence_len, args.chat_template, args.chat_template_kwargs)
    return evaluation_config(args.data, args.model, checkpoint, args.adapter, *more)


def run(argv: list[str]) -> None:
    args = parse(argv)
    start_worker()
    args.model = base_for(args.adapter, args.model)
    checkpoint = open_checkpoint(args.model, parse_options(args.model_option), kept_options(args.adapter))
    checkpoint = extended_for(checkpoint, args.adapter)
    lora, tensors = read_adapter(args.adapter, checkpoint.config) if args.adapter is not None else (None, None)
    if lora:
        note_other_base(args.adapter, checkpoint.name)
    held_out = read_held_out(config_of(args, checkpoint), checkpoint)
    counts = held_out.data.counts
    if counts.truncated or counts.dropped or counts.boundary_tokens:
        print(summary(counts, truncates=True), file=sys.stderr)
    for note in held_out.data.notes:
        print(f"note: {note}", file=sys.stderr)
    if note := lost_window(checkpoint, held_out.longest):
        print(f"note: {note}", file=sys.stderr)
    with device_errors():
        device = open_device(args.device)
        layout = AdapterLayout(lora, checkpoint.config) if lora else None
        model = load_model(device, settled(device, checkpoint))
        with busy("compiling"):
            engine = held_out.engine(device, model, layout, tensors)
        samples = f"evaluating {len(held_out.source):,} samples"
        with progress(held_out.tokens, samples, " tokens") as advance:
            result = held_out.loss(engine, advance=advance)
    numbers = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    print(json.dumps({k: v if math.isfinite(v) else None for k, v in numbers.items()}))
    hint(try_out_command(args.adapter) if args.adapter else START)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
