"""`python -m lorawgpu.report RUN_DIR`: charts and samples of a finished or running run in one HTML file."""

import sys
from pathlib import Path

from lorawgpu.cli import main_of, parser_of
from lorawgpu.errors import UserError
from lorawgpu.report.page import write_report


def run(argv: list[str]) -> None:
    parser = parser_of("report", epilog="A running or interrupted run is reported up to its last record.")
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the output_dir of a run")
    folder = parser.parse_args(argv).run
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; wanted the output_dir of a run")
    print(write_report(folder))


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
