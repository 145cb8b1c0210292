"""`python -m lorawgpu.train CONFIG.yaml`: fine-tune a model as a YAML file says."""

import sys

from .cli import add_device_option, main_of, parser_of
from .config import load_config
from .gpu import open_device
from .run import build_engine, prepare
from .trainer import Trainer


def run(argv: list[str]) -> int:
    parser = parser_of("train")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("--set", metavar="key=value", action="append", default=[], help="override a key of the config")
    add_device_option(parser)
    args = parser.parse_args(argv)
    config = load_config(args.config, args.set)
    prepared = prepare(config)
    device = open_device(args.device or config.device)
    engine = build_engine(prepared, device)
    return Trainer(prepared, engine).train()


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
