"""`lorawgpu verify CASE_DIR...`: loss, logits, gradients, optimizer steps and greedy text against golden cases."""

import json
import sys

from lorawgpu.cli import START, add_device_option, add_model_option, hint, main_of, parser_of
from lorawgpu.errors import CheckFailed
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.verify.cases import choose_cases, read_case
from lorawgpu.verify.compare import judge
from lorawgpu.verify.run import run_case
from lorawgpu.weights.options import parse_options

COLUMNS = {
    "loss": "loss_abs_err",
    "logits": "logits_rel",
    "gradient": "grad_rel_max",
    "norms": "grad_norm_rel_max",
    "steps": "step_loss_abs_err",
    "update": "after3_rel_max",
}


def table_row(row: dict) -> str:
    """One case as a table row; "-" for a quantity that the case does not have."""
    cells = ["-" if row[key] is None else f"{row[key]:.1e}" for key in COLUMNS.values()]
    greedy = {None: "-", True: "equal", False: "differs"}[row["greedy_match"]]
    return _line(row["case"], cells, greedy, "ok" if row["ok"] else "NOT OK")


def _line(name, cells, greedy, verdict) -> str:
    return f"{name:<20}" + "".join(f"{c:>10}" for c in cells) + f"{greedy:>9}  {verdict}"


def run(argv: list[str]):
    parser = parser_of("verify")
    parser.add_argument("cases", nargs="+", metavar="CASE_DIR", help="a golden case directory")
    parser.add_argument("--model", metavar="M", help="model for cases without one: a folder, .gguf file or hub name")
    add_model_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per case and line")
    add_device_option(parser)
    args = parser.parse_args(argv)
    folders, others = choose_cases(args.cases)
    for path in others:
        print(f"{path}: skipped, not a golden case (no case.json)", file=sys.stderr)
    options = parse_options(args.model_option)
    cases = [read_case(folder, args.model, options) for folder in folders]
    device = open_device(args.device)
    print(f"{device.name}: {device.reason}", file=sys.stderr)
    kernels, faults = KernelCache(device), []
    if not args.json:
        print(_line("case", COLUMNS, "greedy", ""))
    for case in cases:
        row, wrong = judge(case, run_case(device, case, kernels))
        print(json.dumps(row) if args.json else table_row(row), flush=True)
        faults += [f"{case.name}: {fault}" for fault in wrong]
    if faults:
        raise CheckFailed("\n  ".join(["not ok:", *faults]))
    hint(START)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
