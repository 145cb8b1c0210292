"""`python -m lorawgpu.train CONFIG.yaml`: fine-tune a model as described by a YAML file."""

import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.cli import add_device_option, hint, main_of, parser_of, quoted, try_out_command
from lorawgpu.config.keys import keys_table
from lorawgpu.config.load import load_config_and_notes
from lorawgpu.config.schema import TrainConfig, json_schema
from lorawgpu.config.translate import Notes
from lorawgpu.data.dataset import Data
from lorawgpu.data.preview import preview_lines
from lorawgpu.data.workers import start_worker
from lorawgpu.engine.exchange import Exchange
from lorawgpu.errors import UserError
from lorawgpu.gpu import device_errors, open_device, open_dry_device
from lorawgpu.report.page import write_report
from lorawgpu.train.checkpoint import Snapshot
from lorawgpu.train.fit import CardMemory, picked_before, picked_for, picked_lines
from lorawgpu.train.identity import start_digest
from lorawgpu.train.placement import build_engine
from lorawgpu.train.ranks import companions, config_values, from_leader, in_turns, require_same, together
from lorawgpu.train.resume import check_same_run, load_snapshot, software, today_of
from lorawgpu.train.run_dir import checkpoint_to_resume, claim, why_refused
from lorawgpu.train.setup import Run, cache_dir, load_data, prepare, settle, text_setup_without_weights
from lorawgpu.train.shares import balanced
from lorawgpu.train.summary import plan_text
from lorawgpu.train.trainer import Trainer
from lorawgpu.util.printable import printable
from lorawgpu.util.streams import lasting_stdout

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
    with companions() as exchange:
        config, notes = together(exchange, lambda: load_config_and_notes(args.config, args.set))
        exchange.set_timeout(config.exchange_timeout_s)
        require_same(exchange, "versions", software())
        require_same(exchange, "config", config_values(config))
        with ExitStack() as stack:
            if not args.dry_run:
                claimed = claim(Path(config.output_dir))
                together(exchange, lambda: stack.enter_context(claimed), exchange.leads)
                stack.enter_context(lasting_stdout())
            code = train(config, args, exchange, notes)
        if not code and exchange.leads:
            hint(again if args.dry_run else try_out_command(config.output_dir))
        return code


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


def train(config: TrainConfig, args: Namespace, exchange: Exchange, notes: Notes) -> int:
    # A dry run writes nothing, so it may plan a new run in a folder that already holds one.
    fresh = args.dry_run and args.resume is None
    path, snapshot = from_leader(exchange, lambda: (None, None) if fresh else found_checkpoint(config, args))
    prepared = picked_run(config, args, exchange, path, snapshot)
    opener = open_dry_device if args.dry_run else open_device
    device = together(exchange, lambda: opener(args.device or config.device, local_rank=exchange.local_rank))
    exchange.introduce(device.name)
    prepared = together(exchange, lambda: settled_on(device, prepared))
    engine = together(exchange, lambda: build_engine(prepared, device, exchange=exchange))
    if config.micro_batches_per_rank == "auto" and not args.dry_run:
        prepared = balanced(prepared, engine, snapshot)
    trainer = together(exchange, lambda: Trainer(prepared, engine, snapshot, Path(args.config)))
    print(printable(plan_text(trainer.plan)), flush=True)
    if lines := notes.lines(sum(tensor.size for tensor in prepared.start.values())):
        print(printable("note     " + "\n         ".join(lines)), flush=True)
    print(printable(f"output   {prepared.folder}" + (f", resumed from {path}" if path else "")), flush=True)
    if args.resume and not path:
        print(f"resume   no checkpoint in {prepared.folder}: starting at step 1", flush=True)
    if args.dry_run:
        if fresh and (reason := why_refused(prepared.folder, Path(args.config), resuming=False)):
            print(f"note     the real run would be refused: {reason}")
        return 0
    code = trainer.train()
    if exchange.leads:
        write_report_if_possible(prepared.folder)
    return code


def found_checkpoint(config: TrainConfig, args: Namespace) -> tuple[Path | None, Snapshot | None]:
    """Where --resume continues from, and what is there."""
    path = checkpoint_to_resume(Path(config.output_dir), args.resume, Path(args.config))
    return path, load_snapshot(path) if path else None


def prepared_in_turns(
    config: TrainConfig, args: Namespace, exchange: Exchange, path: Path | None, snapshot: Snapshot | None
) -> Run:
    """Tokenize once on each file system; then the processes compare what they have."""
    today = today_of(snapshot) if snapshot else None if exchange.size == 1 else from_leader(exchange, datetime.now)
    prepared = in_turns(
        exchange,
        lambda: prepare(config, args.skip_bad_lines, today, args.dry_run, path, exchange.size),
        cache_dir(config),
    )
    if exchange.size > 1:  # the identity waits until the model's files are hashed
        require_same(exchange, "model, data or adapter", prepared.identity | {"start": start_digest(prepared.start)})
    return prepared


def picked_run(
    config: TrainConfig, args: Namespace, exchange: Exchange, path: Path | None, snapshot: Snapshot | None
) -> Run:
    """The run with the settings that `--memory` picks, or picked when the run to resume began."""
    picked = picked_before(snapshot)
    prepared = prepared_in_turns(config.model_copy(update=picked), args, exchange, path, snapshot)
    if snapshot:
        together(exchange, lambda: check_same_run(prepared, snapshot, path))

    def pick() -> dict:
        device = open_dry_device(args.device or config.device, local_rank=exchange.local_rank)
        return picked_for(prepared, args.memory, device, resuming=bool(snapshot))

    if args.memory:
        picked = from_leader(exchange, pick)
        prepared = prepared_in_turns(config.model_copy(update=picked), args, exchange, path, snapshot)
    if picked and exchange.leads:
        print(picked_lines(config, prepared.config, args.memory), flush=True)
    return replace(prepared, picked=picked)


def settled_on(device, prepared: Run) -> Run:
    with device_errors():
        return settle(prepared, device)


def write_report_if_possible(folder: Path) -> None:
    """The run is finished and saved, so a report that cannot be written is only a note."""
    try:
        print(f"report: {write_report(folder)}")
    except (UserError, OSError) as error:
        print(f"note: no report: {error}", file=sys.stderr)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
