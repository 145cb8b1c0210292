"""`python -m lorawgpu.train CONFIG.yaml`: fine-tune a model as described by a YAML file."""

import json
import sys
from argparse import Namespace

from lorawgpu.api.training import train
from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.cli import add_device_option, hint, main_of, parser_of, quoted, try_out_command
from lorawgpu.config.keys import keys_table
from lorawgpu.config.load import load_config_and_notes
from lorawgpu.config.schema import TrainConfig, json_schema
from lorawgpu.data.dataset import Data
from lorawgpu.data.preview import preview_lines
from lorawgpu.data.workers import start_worker
from lorawgpu.errors import UserError
from lorawgpu.train.fit import CardMemory
from lorawgpu.train.interrupt import Interrupted
from lorawgpu.train.job import Job, read_job_config, ready_trainer
from lorawgpu.train.ranks import companions
from lorawgpu.train.setup import load_data, text_setup_without_weights

EPILOG = (
    "Ctrl-C, SIGTERM or a closed terminal finishes the step, saves a checkpoint and exits with code 130, 143 or 129; "
    "a second Ctrl-C or SIGTERM exits at once. Exit code 0: done; 1: too many bad steps, or the adapter failed its "
    "final check; 2: wrong input; 3: the device failed."
)


def parse(argv: list[str]) -> Namespace:
    parser = parser_of("train", epilog=EPILOG)
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?")
    parser.add_argument("--set", metavar="key=value", action="append", default=[], help="override a config key")
    usage = "continue from the newest checkpoint in output_dir, or from DIR"
    parser.add_argument("--resume", metavar="auto|DIR", nargs="?", const="auto", help=usage)
    usage = "print the plan and the memory it needs, without allocating it, and exit"
    parser.add_argument("--dry-run", action="store_true", help=usage)
    parser.add_argument("--preview", metavar="N", type=int, help="show N samples with their target tokens, and exit")
    parser.add_argument("--json", action="store_true", help="print the preview as JSON lines")
    parser.add_argument("--skip-bad-lines", action="store_true", help="skip bad lines of data, and count and list them")
    usage = "print the keys of a config with default and meaning, or those that WORD is in"
    parser.add_argument("--keys", metavar="WORD", nargs="?", const="", help=usage)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the config, for editors")
    usage = "pick batch sizes, checkpointing and, if nothing else fits, a shorter sequence_len for a GPU of that memory"
    parser.add_argument("--memory", metavar="8GiB", help=usage)
    add_device_option(parser, "; several, with commas, for the processes of one machine")
    args = parser.parse_args(argv)
    if args.config is None and not args.schema and args.keys is None:
        raise UserError("no config given; wanted CONFIG.yaml (see lorawgpu train --help)")
    if args.preview is not None and args.preview < 0:
        raise UserError(f"--preview {args.preview}: wanted a number of samples, 0 or more")
    args.memory = CardMemory.read(args.memory) if args.memory is not None else None
    if args.json and args.preview is None:
        raise UserError("--json needs --preview N")
    return args


def run(argv: list[str]) -> int:
    args = parse(argv)
    if args.keys is not None:
        print(keys_table(args.keys))
        return 0
    if args.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    start_worker()
    again = quoted("lorawgpu", "train", args.config, *(word for key in args.set for word in ("--set", key)))
    if args.preview is not None:
        config, _ = load_config_and_notes(args.config, args.set)
        preview(config, args)
        hint(f"{again} --dry-run")
        return 0
    if args.dry_run:
        plan(args)
        hint(again)
        return 0
    options = {"device": args.device, "memory": args.memory, "skip_bad_lines": args.skip_bad_lines}
    try:
        trained = train(args.config, resume=args.resume, overrides=args.set, **options)
    except Interrupted as stop:
        return stop.code
    if trained.leads:
        hint(try_out_command(trained.adapter))
    return 0


def plan(args: Namespace) -> None:
    """Print what the run would do, without writing or allocating anything."""
    job = Job(args.config, args.set, args.resume, args.device, args.memory, args.skip_bad_lines, dry_run=True)
    with companions() as exchange:
        config, notes = read_job_config(job, exchange)
        ready_trainer(config, job, exchange, notes)


def preview(config: TrainConfig, args: Namespace) -> int:
    text = text_setup_without_weights(config)
    data = load_data(config, text, args.skip_bad_lines)
    if not args.json:
        if config.chat_template_kwargs:
            print(f"chat_template_kwargs: {json.dumps(config.chat_template_kwargs, ensure_ascii=False)}")
        if data.counts.other_prompt and (note := prompt_note(text.template)):
            print(f"{note} ({data.counts.other_prompt} samples)")
    truncates = config.excess_length_strategy == "truncate"
    for line in preview_lines(data.stores, text.tokenizer, args.preview, args.json, sys.stdout.isatty(), truncates):
        print(line)
    if not args.json:
        for note in preview_notes(config, data):
            print(f"note: {note}")
    return 0


def preview_notes(config: TrainConfig, data: Data) -> list[str]:
    """What a preview of `data.stores` does not show."""
    if not config.val_set_size:
        return data.notes
    return [f"val_set_size holds out {len(data.validation):,} of these samples", *data.notes]


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
