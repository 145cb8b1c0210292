"""What the processes of a job agree on before the first step, and how an error of one of them ends all."""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from lorawgpu.engine.exchange import Exchange, Solo
from lorawgpu.errors import EXIT_CODES, CheckFailed, DeviceError, UserError, exit_code_of, explain
from lorawgpu.mpi.launch import connect

Result = TypeVar("Result")
KINDS = {kind.__name__: kind for kind in (UserError, DeviceError, CheckFailed)}
# Keys that may differ between ranks: where things are on each machine, and how fast it works.
LOCAL_KEYS = {"device", "output_dir", "dataset_prepared_path", "dataset_num_proc", "max_dispatch_ms", "base_model",
              "adapter", "lora_model_dir", "datasets", "test_datasets", "report_to"}  # fmt: skip
LEADER_FIRST = 2.0  # seconds; if all ranks fail, rank 0 ends the job before the others report the same


@contextmanager
def companions() -> Iterator[Exchange]:
    """The exchange with the processes that were started together. Only the leading one prints.

    An error that all of them raise `together` ends each in good order; any other ends the job with one message.
    """
    if not (exchange := connect()):
        yield Solo()
        return
    try:
        with _quiet(exchange):
            yield exchange
    except (Exception, KeyboardInterrupt) as error:
        if not getattr(error, "agreed", False):
            _end_all(exchange, error)
        exchange.close()
        if exchange.leads:
            raise
        raise SystemExit(exit_code_of(error)) from None
    exchange.close()


@contextmanager
def _quiet(exchange: Exchange) -> Iterator[None]:
    if exchange.leads:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _end_all(exchange, error: BaseException) -> None:
    if not exchange.leads:
        time.sleep(LEADER_FIRST)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, MemoryError):
        text = f"error: {exchange.names[exchange.rank]}: not enough memory"
    elif isinstance(error, OSError) and error.filename:
        text = f"error: {exchange.names[exchange.rank]}: {explain(error)}"
    elif isinstance(error, tuple(EXIT_CODES)):
        text = f"error: {exchange.names[exchange.rank]}: {error}"
    else:
        text = f"{exchange.names[exchange.rank]}:\n" + "".join(traceback.format_exception(error))
    exchange.watch.abort(text, exit_code_of(error))


def together(exchange: Exchange, call: Callable[[], Result], turn: bool = True) -> Result:
    """The result of `call` on this process. If it fails on any of them, all raise one error that names the rank.

    turn: whether this process makes the call; else None.
    """
    if exchange.size == 1:
        return call()
    result = failed = None
    try:
        if turn:
            result = call()
    except (*KINDS.values(), OSError, MemoryError) as error:
        failed = type(error).__name__, str(error) or "not enough memory"
    found = [(name, each) for name, each in zip(exchange.names, exchange.gather(failed), strict=True) if each]
    if found:
        kind, text = found[0][1]
        if len(found) < exchange.size or len({str(each) for _, each in found}) > 1:
            text = "\n".join(f"{name}: {text}" for name, (_, text) in found)
        error = KINDS.get(kind, UserError)(text)
        error.agreed = True
        raise error
    return result


def from_leader(exchange: Exchange, call: Callable[[], Result]) -> Result:
    """The result of `call` on the leading process, on all of them."""
    result = together(exchange, call, exchange.leads)
    if exchange.size == 1:
        return result
    return pickle.loads(exchange.broadcast(pickle.dumps(result) if exchange.leads else None))


def require_same(exchange: Exchange, what: str, values: dict[str, Any]) -> None:
    """Raises UserError on all processes, naming every difference, unless all of them have the same `values`."""
    lines = []
    ranks = exchange.gather(values)
    for key in values:
        for name, theirs in zip(exchange.names, ranks, strict=True):
            if theirs.get(key) != ranks[0].get(key):
                lines.append(f"{key}: {exchange.names[0]} has {ranks[0].get(key)!r}, {name} has {theirs.get(key)!r}")
    if lines:
        error = UserError(
            f"the ranks differ in their {what}\n  " + "\n  ".join(lines) + "\nMake these the same on all machines."
        )
        error.agreed = True
        raise error


def config_values(config) -> dict[str, Any]:
    """The settings that must be the same on all ranks."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in LOCAL_KEYS}


def in_turns(exchange: Exchange, call: Callable[[], Result], shared: Path) -> Result:
    """`call` on all processes, which writes files to the folder `shared`: first on the leading one and on the first one
    of each machine that does not see the same folder, then on those that find the files there."""
    if exchange.size == 1:
        return call()
    mark = shared / f".lorawgpu-{exchange.gather(os.getpid())[0]}"
    if exchange.leads:
        _try(lambda: (shared.mkdir(parents=True, exist_ok=True), mark.touch()))
    exchange.gather(None)
    first = exchange.leads or exchange.local_rank == 0 and not mark.exists()
    result = together(exchange, call, first)
    rest = together(exchange, call, not first)
    if exchange.leads:
        _try(mark.unlink)
    return result if first else rest


def _try(call: Callable[[], Any]) -> None:
    try:
        call()
    except OSError:
        pass  # then no other process sees the mark, and each works by itself
