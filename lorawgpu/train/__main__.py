"""`python -m lorawgpu.train CONFIG.yaml`: fine-tune a model as described by a YAML file."""

import json
import sys
from argparse import Namespace
from pathlib import Path

from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.cli import add_device_option, hint, main_of, parser_of, quoted, try_out_command
from lorawgpu.config.schema import TrainConfig, json_schema, load_config_and_notes
from lorawgpu.config.translate import Notes
from lorawgpu.data.dataset import Data
from lorawgpu.data.preview import preview_lines
from lorawgpu.data.workers import start_worker
from lorawgpu.errors import UserError
from lorawgpu.gpu import device_errors, open_device, open_dry_device
from lorawgpu.report.page import write_report
from lorawgpu.train.resume import check_same_run, load_snapshot, today_of
from lorawgpu.train.run_dir import checkpoint_to_resume, claim, why_refused
from lorawgpu.train.setup import build_engine, load_data, prepare, settle, text_setup_without_weights
from lorawgpu.train.summary import plan_text
from lorawgpu.train.trainer import Trainer
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
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the config, for editors")
    add_device_option(parser)
    args = parser.parse_args(argv)
    if args.config is None and not args.schema:
        raise UserError("no config given; wanted CONFIG.yaml (see lorawgpu train --help)")
    if args.preview is not None and args.preview < 0:
        raise UserError(f"--preview {args.preview}: wanted a number of samples, 0 or more")
    if args.json and args.preview is None:
        raise UserError("--json needs --preview N")
    return args


def run(argv: list[str]) -> int:
    args = parse(argv)
    if args.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    start_worker()
    config, notes = load_config_and_notes(args.config, args.set)
    again = quoted("lorawgpu", "train", args.config, *(word for key in args.set for word in ("--set", key)))
    if args.preview is not None:
        code, following = preview(config, args), f"{again} --dry-run"
    elif args.dry_run:
        code, following = train(config, args, notes), again
    else:
        with claim(Path(config.output_dir)), lasting_stdout():
            code = train(config, args, notes)
        following = try_out_command(config.output_dir)
    if not code:
        hint(following)
    return code


def preview(config: TrainConfig, args: Namespace) -> int:
    text = text_setup_without_weights(config)
    data = load_data(config, text, args.skip_bad_lines)
    if not args.json:
        if config.chat_template_kwargs:
            print(f"chat_template_kwargs: {json.dumps(config.chat_template_kwargs, ensure_ascii=False)}")
        if data.counts.other_prompt and (note := prompt_note(text.template)):
            print(f"{note} ({data.counts.other_prompt} samples)")
    for line in preview_lines(data.stores, text.tokenizer, args.preview, args.json, sys.stdout.isatty()):
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


def train(config: TrainConfig, args: Namespace, notes: Notes) -> int:
    # A dry run writes nothing, so it may plan a new run in a folder that already holds one.
    fresh = args.dry_run and args.resume is None
    path = None if fresh else checkpoint_to_resume(Path(config.output_dir), args.resume, Path(args.config))
    snapshot = load_snapshot(path) if path else None
    prepared = prepare(config, args.skip_bad_lines, today_of(snapshot) if snapshot else None, args.dry_run, path)
    if snapshot:
        check_same_run(prepared, snapshot, path)
    device = (open_dry_device if args.dry_run else open_device)(args.device or config.device)
    with device_errors():
        prepared = settle(prepared, device)
    engine = build_engine(prepared, device)
    trainer = Trainer(prepared, engine, snapshot, Path(args.config))
    print(plan_text(trainer.plan), flush=True)
    if lines := notes.lines(sum(tensor.size for tensor in prepared.start.values())):
        print("note     " + "\n         ".join(lines), flush=True)
    print(f"output   {prepared.folder}" + (f", resumed from {path}" if path else ""), flush=True)
    if args.resume and not path:
        print(f"resume   no checkpoint in {prepared.folder}: starting at step 1", flush=True)
    if args.dry_run:
        if fresh and (reason := why_refused(prepared.folder, Path(args.config), resuming=False)):
            print(f"note     the real run would be refused: {reason}")
        return 0
    code = trainer.train()
    write_report_if_possible(prepared.folder)
    return code


def write_report_if_possible(folder: Path) -> None:
    """The run is finished and saved, so a report that cannot be written is only a note."""
    try:
        print(f"report: {write_report(folder)}")
    except (UserError, OSError) as error:
        print(f"note: no report: {error}", file=sys.stderr)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
