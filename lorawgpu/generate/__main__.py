"""`python -m lorawgpu.generate --model M [--adapter A] (--prompt TEXT | --prompts FILE | --chat)`: generate text."""

import json
import sys
from argparse import Namespace
from dataclasses import fields

from lorawgpu.api.model import MAX_NEW_TOKENS, Ended, LoadedModel, load
from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.cli import (
    START,
    add_device_option,
    add_model_options,
    add_template_kwargs_option,
    hint,
    main_of,
    parser_of,
    quoted,
)
from lorawgpu.data.workers import start_worker
from lorawgpu.errors import UserError
from lorawgpu.generate.prompt_file import Prompt, read_prompts
from lorawgpu.generate.prompts import template_arguments
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import device_errors
from lorawgpu.lora.base_name import base_for, note_other_base
from lorawgpu.util.printable import printable
from lorawgpu.util.progress import progress
from lorawgpu.weights.options import parse_options

CHAT_CONTEXT = 4096  # maximum tokens of a conversation, if the model allows that many
ROOM = 1 / 8  # of that context is reserved for an answer; reserving a long --max-new-tokens could refuse every turn
USAGE = {  # of the sampling options; their defaults come from `Sampling`
    "temperature": "sampling temperature; 0: always choose the most likely token",
    "top_k": "choose among the N most likely tokens; 0: all",
    "top_p": "choose among the most likely tokens that together have this probability",
    "min_p": "choose among tokens at least this fraction as likely as the most likely one",
    "repetition_penalty": "lower the scores of tokens that have already occurred by this factor; 1: off",
    "seed": "random seed: the same seed gives the same text",
}
CHAT_HELP = "An empty line or Ctrl-D ends the conversation; /reset starts a new one."
SIDES = {False: "without the adapter", True: "with the adapter"}  # of --compare, in the order shown


def parse(argv: list[str]) -> Namespace:
    parser = parser_of("generate")
    add_model_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", metavar="TEXT", help="a user's turn if the model has a chat template, else text to continue"
    )
    what.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line, or records with messages, prompt or text (JSONL, JSON, "
        "CSV, Parquet); prints JSON lines with the keys line, prompt, text, cut",
    )
    what.add_argument("--chat", action="store_true", help="chat in a terminal, or answer the lines of a pipe")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the user's turn")
    usage = f"maximum length of an answer in tokens (default {MAX_NEW_TOKENS})"
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=MAX_NEW_TOKENS, help=usage)
    for field in fields(Sampling):
        option, usage = f"--{field.name.replace('_', '-')}", f"{USAGE[field.name]} (default {field.default})"
        metavar = "N" if field.type is int else "X"
        parser.add_argument(option, metavar=metavar, type=field.type, default=field.default, help=usage)
    usage = f"a Jinja file or one of {', '.join(BUILT_IN)} (default: the adapter's, else the model's)"
    parser.add_argument("--chat-template", metavar="T", help=usage)
    add_template_kwargs_option(parser)
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, without the chat template"
    )
    parser.add_argument("--compare", action="store_true", help="also show the answer without the adapter")
    add_device_option(parser)
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: wanted at least 1")
    if args.compare and args.adapter is None:
        raise UserError("--compare shows an answer with and without the adapter: pass one with --adapter")
    if args.chat:
        require_stdin()
    if args.raw and (args.chat or args.system is not None or args.chat_template or args.chat_template_kwargs):
        raise UserError("--raw has no turns: it cannot be combined with --chat, --system or --chat-template(-kwargs)")
    return args


def require_stdin() -> None:
    if sys.stdin is None:  # stdin was closed before Python started
        raise UserError("--chat reads its turns from stdin, which is closed: use --prompt or --prompts")


def show(llm: LoadedModel, prompt, options: dict, side: str = "") -> str:
    """Print an answer as it is generated, and a note on stderr if it was cut. `side`: of SIDES. Returns the answer."""
    ended, pieces = Ended(), []
    for piece in llm.stream(prompt, ended=ended, **options):
        pieces.append(piece)
        print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(flush=True)  # before the note, even if both go to one file
    if ended.reason != "stop":
        why = "--max-new-tokens" if ended.reason == "length" else "the model's context"
        print(f"(cut{side and ' ' + side}: {why} reached)", file=sys.stderr)
    return "".join(pieces)


def show_sides(llm: LoadedModel, prompt, options: dict, compare: bool) -> str:
    """Print the answer; with `compare`, the base model's answer first. Returns the adapter's answer."""
    if not compare:
        return show(llm, prompt, options)
    for use, side in SIDES.items():
        print(f"--- {side} ---")
        text = show(llm, prompt, options | {"use_adapter": use}, side)
    return text


def turns(system: str | None, prompt: Prompt) -> Prompt:
    """The prompt, after a system message if one is given and the prompt has none of its own."""
    if system is None or isinstance(prompt, list) and prompt[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *as_messages(prompt)]


def as_messages(prompt: Prompt) -> list[dict]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def answer_all(llm: LoadedModel, args: Namespace, prompts: dict[int, Prompt], options: dict) -> None:
    """Print a JSON line per prompt. `cut`: --max-new-tokens or the context ended the answer; `base`: no adapter."""
    conversations = [turns(args.system, p) for p in prompts.values()]
    columns = {"line": prompts.keys(), "prompt": prompts.values()}
    for text, cut, use in (("text", "cut", True), ("base", "base_cut", False))[: 1 + args.compare]:
        ended: list[Ended] = []
        side = f" {SIDES[use]}" if args.compare else ""
        with progress(None, f"answering {len(prompts):,} prompts{side}", " tokens") as advance:
            columns[text] = llm.generate(conversations, use_adapter=use, ended=ended, advance=advance, **options)
        columns[cut] = [e.reason != "stop" for e in ended]
    for values in zip(*columns.values(), strict=True):
        print(json.dumps(dict(zip(columns, values, strict=True)), ensure_ascii=False))


def chat(llm: LoadedModel, args: Namespace, options: dict) -> None:
    """Answer turns from stdin: up to an empty line in a terminal, to the end of a file or pipe. Notes go to stderr."""
    context = min(CHAT_CONTEXT, llm.config.max_position_embeddings)
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(start)
    if sys.stdin.isatty():
        print(CHAT_HELP, file=sys.stderr)
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are not UTF-8 become surrogates, as in the C locale
        sys.stdin.reconfigure(errors="surrogateescape")
    while line := read_turn():
        if any("\ud800" <= character <= "\udfff" for character in line):
            print("(this turn is not UTF-8 and was ignored: type it again)", file=sys.stderr)
            continue
        if line == "/reset":
            messages = list(start)
            continue
        turn = {"role": "user", "content": line}
        if why := too_long(llm, messages + [turn], start + [turn], context, args.max_new_tokens):
            print(f"({why})", file=sys.stderr)
            continue
        messages.append(turn)
        text = show_sides(llm, messages, options | {"context": context, "reuse": True}, args.compare)
        messages.append({"role": "assistant", "content": text})


def too_long(llm: LoadedModel, messages: list[dict], after_reset: list[dict], context: int, max_new_tokens: int) -> str:
    """Why a turn is refused, "" if it is not. `after_reset`: the conversation if /reset came first."""
    room = min(max_new_tokens, max(1, int(context * ROOM)))
    if len(llm.encode(messages)) <= context - room:
        return ""
    if len(ids := llm.encode(after_reset)) > context - room:
        return (
            f"this turn has {len(ids)} tokens and leaves fewer than {room} of the context of {context} for an answer: "
            "shorten it"
        )
    return (
        f"with this turn, the conversation leaves fewer than {room} tokens of the context of {context} for an answer: "
        "/reset starts a new one"
    )


def read_turn() -> str:
    """The next turn of the user, "" at the end. Only in a terminal does an empty line end the conversation."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip()
    return next((turn for line in sys.stdin if (turn := line.strip())), "")


def run(argv: list[str]) -> None:
    args = parse(argv)
    start_worker()
    sampling = Sampling(**{f.name: getattr(args, f.name) for f in fields(Sampling)}).check()
    prompts = read_prompts(args.prompts) if args.prompts else {}
    if args.raw and (line := next((n for n, prompt in prompts.items() if isinstance(prompt, list)), None)):
        raise UserError(f"{args.prompts}, line {line}: a conversation, which --raw cannot continue as plain text")
    with device_errors():
        arguments = template_arguments(args.chat_template_kwargs)
        said = parse_options(args.model_option)
        llm = load(base_for(args.adapter, args.model), args.adapter, args.device, args.chat_template, arguments, said)
        if args.adapter is not None:
            note_other_base(args.adapter, llm.checkpoint.name)
        options = {"max_new_tokens": args.max_new_tokens, "sampling": sampling}
        if args.chat:
            chat(llm, args, options)
        elif args.prompts:
            answer_all(llm, args, prompts, options | {"raw": args.raw})
        else:
            show_sides(llm, turns(args.system, args.prompt), options | {"raw": args.raw}, args.compare)
    hint(
        quoted("lorawgpu", "export", "--adapter", args.adapter, "--to", "gguf", "--out", "mine.gguf")
        if args.adapter
        else START
    )


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
