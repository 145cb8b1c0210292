"""`python -m lorawgpu.init --model M --data FILE [--out CONFIG.yaml]`: write a starter config."""

import sys
from pathlib import Path

from lorawgpu.cli import hint, main_of, parser_of, quoted
from lorawgpu.config.load import load_config
from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.names import stem_of
from lorawgpu.init.starter import Source, starter


def run(argv: list[str]) -> None:
    parser = parser_of("init")
    usage = "a Hugging Face folder, a .gguf file, builtin:NAME, or a hub name"
    parser.add_argument("--model", metavar="M", required=True, help=usage)
    usage = "what to train on: a file, a folder, a glob, builtin:NAME, or a hub name"
    parser.add_argument("--data", metavar="FILE", required=True, help=usage)
    parser.add_argument("--type", metavar="T", help="the type of the data, if its keys fit several")
    usage = "the config to write (default: named after the data, in the current folder)"
    parser.add_argument("--out", metavar="CONFIG.yaml", help=usage)
    args = parser.parse_args(argv)
    out = Path(args.out or f"{stem_of(args.data)}.yaml")
    if out.exists():
        raise UserError(f"{out} already exists; remove it, or give --out another name")
    text = starter(Source(args.model, args.data, args.type), out)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, text.encode())
    load_config(out)
    print(f"wrote {out}")
    for line in text.splitlines()[2:]:
        if not line.startswith("# "):
            break
        print(f"  {line[2:]}")
    hint(quoted("lorawgpu", "train", out, "--preview", 3))


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
