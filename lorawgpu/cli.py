"""`lorawgpu <command>`, the exit codes of all commands, and the options that several commands share."""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from lorawgpu import __version__
from lorawgpu.errors import EXIT_CODES, INTERRUPTED, UserError, exit_code_of, explain
from lorawgpu.util.printable import message
from lorawgpu.util.streams import STDOUT, guarded, open_closed, print_anything
from lorawgpu.util.suggest import nearest

COMMANDS = {
    "init": "write a starter config for a model and a data file",
    "train": "fine-tune a model as described by a YAML file",
    "generate": "generate text with a model and an adapter",
    "serve": "OpenAI's API and a page for a model and its adapters",
    "evaluate": "loss and perplexity on a file",
    "export": "export an adapter to PEFT, llama.cpp or MLX, or merge it",
    "verify": "check losses, gradients and steps against golden cases",
    "doctor": "check this machine: drivers, limits, every kernel",
    "bench": "how fast this device trains, by model and by kernel",
    "report": "charts and samples of a run",
}


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong command line raises UserError (one message, without the usage), and help that cannot be
    written raises OSError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def print_help(self, file=None) -> None:
        print(self.format_help(), end="", file=file, flush=True)


def main_of(run: Callable[[list[str]], int | None]) -> Callable[[Sequence[str] | None], int]:
    """The `main` of a command: calls `run(argv)` and turns exceptions into `error: ...` on stderr and an exit code.

    0: done (or the value that `run` returns); 1: CheckFailed; 2: UserError, a file that cannot be read or written, or
    not enough memory;
    3: DeviceError; 130: Ctrl-C. Anything else is a bug and keeps its traceback.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        open_closed()
        print_anything()
        with guarded():
            code = _code_of(run, list(sys.argv[1:] if argv is None else argv))
            unwritten = _code_of(_flush, [])
            return code or unwritten

    return main


def _code_of(run: Callable[[list[str]], int | None], argv: list[str]) -> int:
    try:
        return run(argv) or 0
    except tuple(EXIT_CODES) as error:
        name = getattr(error, "filename", None)
        if isinstance(error, BrokenPipeError) and name == STDOUT:
            return 0  # `lorawgpu generate ... | head`: not an error
        print("error: " + message(explain(error) if name else str(error)), file=sys.stderr)
        return exit_code_of(error)
    except MemoryError as error:
        print(f"error: not enough memory: {str(error) or 'Python could not get more'}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _flush(_) -> None:
    """Flush here, because a failing flush at interpreter shutdown would set an exit code of Python's own."""
    sys.stdout.flush()


def parser_of(command: str, **kwargs) -> Parser:
    """The parser of `lorawgpu <command>`."""
    return Parser(prog=f"lorawgpu {command}", description=COMMANDS[command], allow_abbrev=False, **kwargs)


def add_device_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    """--device; None if not given: then $LORAWGPU_DEVICE, then `auto` (see gpu.open_device)."""
    usage = "the GPU to use: auto, cpu, gpu, an index, or part of a name (default: $LORAWGPU_DEVICE, then auto)"
    parser.add_argument("--device", metavar="auto|cpu|gpu|INDEX|NAME", help=usage + more)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model and --adapter; see `lora.base_name.base_for`."""
    usage = "a Hugging Face folder, a .gguf file, builtin:NAME, ollama:NAME, or a hub name"
    parser.add_argument("--model", metavar="M", help=f"{usage} (default: the adapter's base model)")
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT adapter directory")
    add_model_option(parser)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """--model-option KEY=VALUE, repeatable."""
    usage = "say what the model's files leave open: hidden_act=relu2, i2_s_layout=x86 (default: the adapter's)"
    parser.add_argument("--model-option", metavar="KEY=VALUE", action="append", default=[], help=usage)


def add_template_kwargs_option(parser: argparse.ArgumentParser) -> None:
    """--chat-template-kwargs, a mapping in JSON or YAML."""
    usage = "variables of the chat template, such as '{enable_thinking: false}' (default: the adapter's)"
    parser.add_argument("--chat-template-kwargs", metavar="MAP", help=usage)


def hint(text: str) -> None:
    """Name the next command, on stderr, and only for a person: nothing if it is not a terminal."""
    if sys.stderr.isatty():
        print(f"next: {text}", file=sys.stderr)


def quoted(*words: object) -> str:
    """Words as a command line shows them, in quotes where a shell would split them."""
    return " ".join(f'"{word}"' if re.search(r"[^\w./:\\=~+-]", str(word)) else str(word) for word in words)


def try_out_command(adapter: object) -> str:
    """How to see what an adapter does."""
    return quoted("lorawgpu", "generate", "--adapter", adapter, "--compare", "--prompt", "...")


START = "lorawgpu init --model M --data FILE"  # the next command of those that need no adapter


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:<9} {purpose}" for name, purpose in COMMANDS.items())
        print(
            f"usage: lorawgpu <command> ...\n\n{listing}\n\n"
            "lorawgpu help <command>, or lorawgpu <command> --help, shows the options of a command."
        )
        return 0
    if argv[0] == "--version":
        print(f"lorawgpu {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        meant = nearest(argv[0], COMMANDS)
        hint = f"; the nearest one is {meant!r}" if meant else ""
        raise UserError(f"unknown command {argv[0]!r}{hint} (lorawgpu --help lists all)")
    return importlib.import_module(f"lorawgpu.{argv[0]}.__main__").main(argv[1:])


main = main_of(_dispatch)

if __name__ == "__main__":
    sys.exit(main())
