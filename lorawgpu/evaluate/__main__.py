"""`python -m lorawgpu.evaluate --model M [--adapter A] --data FILE`: the loss on a file, as one JSON line."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

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
from lorawgpu.data.batching import token_capacity
from lorawgpu.data.dataset import Concat
from lorawgpu.data.preview import summary
from lorawgpu.data.workers import start_worker
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.engine.readings import settled
from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import special_tokens_of, template_arguments, template_choice
from lorawgpu.gpu import device_errors, open_device
from lorawgpu.gpu.submit_budget import first_rate, flops_per_submit
from lorawgpu.lora.base_name import base_for, note_other_base
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.train.setup import load_data, text_setup_of_model
from lorawgpu.util.progress import busy, progress
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.gguf_checkpoint import lost_window
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.options import parse_options

ROWS = 2048  # tokens evaluated at a time, or the length of a longer sample


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
    """The config with which a training run would read the data; the defaults come from the schema."""
    adapter = Path(args.adapter) if args.adapter is not None else None
    choice = template_choice(adapter, args.chat_template, template_arguments(args.chat_template_kwargs))
    return TrainConfig(
        base_model=args.model,
        datasets=[{"path": args.data}],
        sequence_len=args.sequence_len or checkpoint.config.max_position_embeddings,
        excess_length_strategy="truncate",
        chat_template=choice.name,
        chat_template_jinja=choice.jinja,
        chat_template_kwargs=choice.arguments,
        special_tokens=special_tokens_of(adapter),
    )


def run(argv: list[str]) -> None:
    args = parse(argv)
    start_worker()
    args.model = base_for(args.adapter, args.model)
    checkpoint = open_checkpoint(args.model, parse_options(args.model_option), kept_options(args.adapter))
    lora, tensors = read_adapter(args.adapter, checkpoint.config) if args.adapter is not None else (None, None)
    if lora:
        note_other_base(args.adapter, checkpoint.name)
    config = config_of(args, checkpoint)
    data = load_data(config, text_setup_of_model(config, checkpoint), purpose="evaluate")
    if data.counts.truncated or data.counts.dropped or data.counts.boundary_tokens:
        print(summary(data.counts, truncates=True), file=sys.stderr)
    for note in data.notes:
        print(f"note: {note}", file=sys.stderr)
    source = Concat(data.train)
    longest, tokens = int(source.lengths.max()), int(source.lengths.sum())
    if note := lost_window(checkpoint, longest):
        print(f"note: {note}", file=sys.stderr)
    with device_errors():
        device = open_device(args.device)
        layout = AdapterLayout(lora, checkpoint.config) if lora else None
        rows = token_capacity(1, max(longest, min(tokens, ROWS)))
        submit = flops_per_submit(first_rate(device), config.max_dispatch_ms)
        model = load_model(device, settled(device, checkpoint))
        with busy("compiling"):
            engine = Engine(device, model, Options(rows, longest, flops_per_submit=submit), layout, tensors)
            engine.plan("eval", rows)
        with progress(tokens, f"evaluating {len(source):,} samples", " tokens") as advance:
            result = evaluate_source(engine, source, advance=advance)
    numbers = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    print(json.dumps({k: v if math.isfinite(v) else None for k, v in numbers.items()}))
    hint(try_out_command(args.adapter) if args.adapter else START)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
