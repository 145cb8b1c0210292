"""Loggers in addition to `metrics.jsonl`: TensorBoard and Weights & Biases, through their own libraries."""

import importlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from lorawgpu.errors import UserError

MAX_REASON = 300  # characters of another library's message


class Logger(ABC):
    """Receives the numbers of each record. Non-finite values are left out: neither service can plot them."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if finite:
            self._send(step, finite)

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Logger):
    """Event files in RUN_DIR/tensorboard; view them with `tensorboard --logdir RUN_DIR`."""

    module = "tensorboard.summary"

    def __init__(self, library: ModuleType, folder: Path, config: dict[str, Any]):
        self.writer = library.Writer(str(folder / "tensorboard"))

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(Logger):
    """A W&B run named after the run folder; W&B's environment variables (WANDB_PROJECT, WANDB_MODE, ...) apply."""

    module = "wandb"

    def __init__(self, library: ModuleType, folder: Path, config: dict[str, Any]):
        names = {"entity": config["wandb_entity"], "id": config["wandb_run_id"], "mode": config["wandb_mode"]}
        self.run = library.init(
            project=config["wandb_project"] or os.environ.get("WANDB_PROJECT", "lorawgpu"),
            name=config["wandb_name"] or folder.name,
            dir=str(folder),
            config=config,
            resume="allow" if config["wandb_run_id"] else None,
            **{name: value for name, value in names.items() if value is not None},
        )

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


LOGGERS = {"tensorboard": TensorBoard, "wandb": WandB}


class Tolerant(Logger):
    """A logger whose errors are no errors of the run: the first one is a note, and the run goes on without it."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]):
        self.name, self.logger = name, None
        self.logger = self._attempt(lambda: LOGGERS[name](_library(name), folder, config))

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        if self.logger is not None:
            self._attempt(lambda: self.logger._send(step, numbers))

    def close(self) -> None:
        if self.logger is not None:
            self._attempt(self.logger.close)

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # W&B raises its own, its HTTP client's and the system's
            self.logger = None
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON]
            tqdm.write(f"note: report_to: {self.name} failed ({why}); the run goes on without it", file=sys.stderr)
            return None


def require_loggers(names: Sequence[str]) -> None:
    """Raises UserError for a library that is not installed, or cannot be imported."""
    for name in names:
        _library(name)


def open_loggers(names: Sequence[str], folder: Path, config: dict[str, Any]) -> list[Logger]:
    """The loggers of `report_to`. Raises UserError as `require_loggers`; any other error of theirs is a note."""
    return [Tolerant(name, folder, config) for name in names]


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(LOGGERS[name].module)
    except ImportError as error:
        raise UserError(
            f"report_to: {name} is not installed ({error}): pip install {name}, or remove it from report_to"
        ) from None
    except Exception as error:  # installed, but broken, such as for another version of a library
        raise UserError(
            f"report_to: {name} cannot be imported ({str(error)[:MAX_REASON]}): install it again, or remove it from "
            "report_to"
        ) from None
