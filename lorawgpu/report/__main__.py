"""`python -m lorawgpu.report RUN_DIR`: charts and samples of a finished or running run in one HTML file."""

import sys
from pathlib import Path

from lorawgpu.cli import hint, main_of, parser_of, try_out_command
from lorawgpu.errors import UserError
from lorawgpu.report.page import write_report


def run(argv: list[str]) -> None:
    parser = parser_of("report", epilog="A running or interrupted run is reported up to its last record.")
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the output_dir of a run")
    parser.add_argument("other", metavar="RUN_DIR", type=Path, nargs="?", help="another run, to see both side by side")
    args = parser.parse_args(argv)
    for folder in filter(None, (args.run, args.other)):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; wanted the output_dir of a run")
    print(write_report(args.run, args.other))
    hint(try_out_command(args.run))


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
