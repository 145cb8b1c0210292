"""`python -m lorawgpu.serve --model M [--adapter NAME=PATH ...]`: OpenAI's API, and a page to try it."""

import os
import socket
import sys
from argparse import Namespace

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.cli import add_device_option, add_model_option, add_template_kwargs_option, main_of, parser_of
from lorawgpu.config.model_options import kept_options
from lorawgpu.data.workers import start_worker
from lorawgpu.engine.readings import settled
from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import template_arguments
from lorawgpu.gpu import device_errors, open_device
from lorawgpu.lora.base_name import base_for
from lorawgpu.ops.decode_state import MAX_SEQUENCES
from lorawgpu.serve.limits import CACHE, CONTEXT, LOOPBACK, QUEUE, SEQUENCES
from lorawgpu.serve.models import parse_adapters
from lorawgpu.serve.setup import Sizes, load_adapters, open_service, share
from lorawgpu.util.progress import busy
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.options import parse_options


def parse(argv: list[str]) -> Namespace:
    parser = parser_of("serve")
    usage = "a Hugging Face folder, a .gguf file, builtin:NAME, ollama:NAME, or a hub name"
    parser.add_argument("--model", metavar="M", help=f"{usage} (default: the first adapter's base model)")
    usage = "a PEFT adapter directory, served as NAME (default: the folder's name); may be repeated"
    parser.add_argument("--adapter", metavar="NAME=PATH", action="append", default=[], help=usage)
    parser.add_argument("--name", help="the name of the base model in the API (default: M)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: loopback only)")
    parser.add_argument("--port", type=int, default=8000, help="the port to listen on (default 8000; 0: a free one)")
    usage = "answer only requests that send this key (default: $LORAWGPU_API_KEY, else all)"
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("LORAWGPU_API_KEY"), help=usage)
    usage = f"the most tokens of a prompt and its answer (default: the model's context, at most {CONTEXT:,})"
    parser.add_argument("--context", metavar="N", type=int, help=usage)
    usage = f"tokens of all prompts and answers that are in work at once (default {CACHE:,})"
    parser.add_argument("--cache-tokens", metavar="N", type=int, help=usage)
    usage = f"answers that are generated at once (default {SEQUENCES}, at most {MAX_SEQUENCES})"
    parser.add_argument("--max-sequences", metavar="N", type=int, default=SEQUENCES, help=usage)
    usage = f"answers that may wait for a place; more are refused (default {QUEUE})"
    parser.add_argument("--queue", metavar="N", dest="waiting", type=int, default=QUEUE, help=usage)
    usage = f"a Jinja file or one of {', '.join(BUILT_IN)} (default: each adapter's, else the model's)"
    parser.add_argument("--chat-template", metavar="T", help=usage)
    add_template_kwargs_option(parser)
    add_model_option(parser)
    add_device_option(parser)
    return check(parser.parse_args(argv))


def check(args: Namespace) -> Namespace:
    """UserError for a number out of range."""
    ranges = {
        "port": (0, 65535),
        "context": (2, 1 << 30),
        "cache_tokens": (128, 1 << 30),
        "max_sequences": (1, MAX_SEQUENCES),
        "waiting": (0, 1 << 20),
    }
    for name, (least, most) in ranges.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            option = {"waiting": "queue"}.get(name, name).replace("_", "-")
            raise UserError(f"--{option} {value}: wanted a number from {least} to {most:,}")
    key = args.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() != ""):
        raise UserError("--api-key: wanted printable ASCII, without spaces around it")
    return args


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound before anything is loaded. UserError if the address is taken, or is none of ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from None
    return listener


def run(argv: list[str]) -> None:
    args = parse(argv)
    try:
        import uvicorn

        from lorawgpu.serve.app import UVICORN, make_app
    except ImportError as error:
        raise UserError(f"serve needs starlette and uvicorn ({error}): pip install starlette uvicorn") from None
    adapters, arguments = parse_adapters(args.adapter), template_arguments(args.chat_template_kwargs)
    first = next(iter(adapters.values()), None)
    start_worker()
    name = str(base_for(first, args.model))
    checkpoint = open_checkpoint(name, parse_options(args.model_option), kept_options(first))
    on_loopback = args.host in LOOPBACK
    errors: list[BaseException] = []
    servers: list[uvicorn.Server] = []

    def failed(error: BaseException) -> None:
        errors.append(error)
        for server in servers:
            server.should_exit = True

    with listen(args.host, args.port) as listener, device_errors():
        device = open_device(args.device)
        sizes = Sizes(args.context, args.cache_tokens, args.max_sequences, args.waiting).fitted(device, checkpoint)
        with busy("loading"):
            shared = share(device, checkpoint, load_model(device, settled(device, checkpoint)), sizes, None)
            template = args.chat_template, arguments
            service = open_service(checkpoint, shared, args.name or name, sizes, failed, template)
            load_adapters(service, adapters)
            for served in service.models.all():  # kernels are compiled before anyone waits for them
                service.scheduler.call(served.decoder.prepare).result()
        app = make_app(service, args.api_key, args.host, may_load=on_loopback or args.api_key is not None)
        servers.append(uvicorn.Server(uvicorn.Config(app, **UVICORN)))
        listener.listen()  # so that nobody is turned away who reads the address below
        announce(args, listener, [served.name for served in service.models.all()])
        try:
            servers[0].run(sockets=[listener])
        finally:
            service.close()
    if errors:
        raise errors[0]
    raise KeyboardInterrupt  # uvicorn passes Ctrl-C on, which has no effect where a shell had it ignored


def announce(args: Namespace, listener: socket.socket, names: list[str]) -> None:
    host, port = listener.getsockname()[:2]
    print(f"serving {', '.join(names)}", file=sys.stderr)
    if args.host not in LOOPBACK and args.api_key is None:
        print("note: anyone who reaches this machine can use it: --api-key asks for a key", file=sys.stderr)
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)  # the page, and before /v1 the API


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
