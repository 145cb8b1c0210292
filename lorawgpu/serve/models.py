"""What is served: a base model under its name, and adapters over it under theirs, which come and go."""

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lorawgpu.chat.arguments import Arguments
from lorawgpu.errors import DeviceError, UserError
from lorawgpu.generate.batch import BatchDecoder
from lorawgpu.generate.plans import Shared
from lorawgpu.generate.prompts import Prompts, special_tokens_of, template_for
from lorawgpu.lora.base_name import note_other_base
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.limits import MAX_ADAPTERS
from lorawgpu.serve.scheduler import Scheduler
from lorawgpu.serve.text import Marks
from lorawgpu.serve.tool_calls import Format, format_of
from lorawgpu.weights.extended import extended_for, rows_of_adapter
from lorawgpu.weights.loader import Checkpoint

VARIANTS = 4  # of a model that are kept


@dataclass(eq=False)
class Served:
    """A name that requests may ask for. `path`: the adapter's folder, None for the base model."""

    name: str
    path: Path | None
    prompts: Prompts
    stop_ids: frozenset[int]
    decoder: BatchDecoder
    created: int = field(default_factory=lambda: int(time.time()))
    variants: dict[str, Prompts] = field(default_factory=dict)  # with other values for the template, by these

    @cached_property
    def tools(self) -> Format | None:
        """How it writes tool calls."""
        template = self.prompts.template
        return None if template is None else format_of(template.tool_use or template.source)

    @cached_property
    def marks(self) -> Marks:
        """The control tokens of its tool calls."""
        tokenizer = self.prompts.tokenizer
        ids = {token: tokenizer.token_id(token) for token in (self.tools.tokens if self.tools else ())}
        return {i: token for token, i in ids.items() if i is not None and i in tokenizer.special_ids}


class Models:
    """The base model, which `shared` has on the device, and the adapters that are loaded.

    `template`, `arguments`: a chat template for all of them, and values for its variables; else each has its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shared: Shared,
        scheduler: Scheduler,
        name: str,
        template: str | None = None,
        arguments: Arguments | None = None,
    ):
        self.checkpoint, self.shared, self.scheduler = checkpoint, shared, scheduler
        self._template, self._lock = (template, arguments), threading.Lock()
        self._tokenizer = checkpoint.tokenizer()
        self.base = self._served(name, None, BatchDecoder(shared, None))
        self._served_by_name = {name: self.base}
        self._loading: set[str] = set()

    @property
    def config(self):
        return self.checkpoint.config

    def all(self) -> list[Served]:
        with self._lock:
            return list(self._served_by_name.values())

    def find(self, name: str) -> Served:
        """ApiError 404 for a name that is not served."""
        with self._lock:
            if name in self._served_by_name:
                return self._served_by_name[name]
        message = f"The model '{name}' does not exist: GET /v1/models lists those that do."
        raise ApiError(404, message, "model", "model_not_found")

    def load(self, name: str, path: Path) -> Served:
        """Read an adapter and put it on the device. UserError if it does not fit the model, ApiError if its name is
        taken, or there are too many."""
        with self._lock:
            if name in self._served_by_name or name in self._loading:
                raise ApiError(400, f"The name '{name}' is taken: unload it first, or choose another one.", "lora_name")
            if len(self._served_by_name) + len(self._loading) > MAX_ADAPTERS:
                raise ApiError(400, f"{MAX_ADAPTERS} adapters are loaded, the most that may be: unload one first.")
            self._loading.add(name)
        try:
            if (rows := rows_of_adapter(path)) > self.config.vocab_size:
                raise UserError(
                    f"{path}: has rows for {rows - self.config.vocab_size:,} tokens that the base model lacks, and all "
                    "adapters share its embedding: serve the merged model (lorawgpu export --to merged)"
                )
            lora, tensors = read_adapter(path, self.config)
            note_other_base(path, self.checkpoint.name)
            served = self._served(name, path, self._put(AdapterLayout(lora, self.config), tensors).result())
            with self._lock:
                self._served_by_name[name] = served
            return served
        except DeviceError as error:
            raise ApiError(503, f"The adapter cannot be put on the device: {error}") from None
        finally:
            with self._lock:
                self._loading.discard(name)

    def _put(self, layout: AdapterLayout, tensors) -> Future:
        def put() -> BatchDecoder:
            return BatchDecoder(self.shared, AdapterBuffers.create(self.shared.device, layout, tensors))

        return self.scheduler.call(put)

    def unload(self, name: str) -> None:
        """New requests do not find it any more; answers that have begun are finished. ApiError if it is no adapter."""
        served = self.find(name)
        if served is self.base:
            raise ApiError(400, f"'{name}' is the base model, which cannot be unloaded.", "lora_name")
        with self._lock:
            self._served_by_name.pop(name, None)

    def prompts_with(self, served: Served, arguments: Arguments | None) -> Prompts:
        """The prompts of a model with other values for its template's variables. UserError for one it does not read."""
        if not arguments:
            return served.prompts
        key = json.dumps(arguments, sort_keys=True)
        if key not in served.variants:
            tokenizer, (template, own) = served.prompts.tokenizer, self._template
            variant = Prompts(tokenizer, template_for(tokenizer, served.path, template, (own or {}) | arguments))
            if len(served.variants) >= VARIANTS:
                served.variants.clear()
            served.variants[key] = variant
            return variant
        return served.variants[key]

    def _served(self, name: str, path: Path | None, decoder: BatchDecoder) -> Served:
        own = extended_for(self.checkpoint, path).own_tokenizer
        tokenizer = (own or self._tokenizer).with_special_tokens(special_tokens_of(path))
        prompts = Prompts(tokenizer, template_for(tokenizer, path, *self._template))
        return Served(name, path, prompts, prompts.stop_ids(self.config.eos_token_ids), decoder)


def parse_adapters(pairs: list[str]) -> dict[str, Path]:
    """The values of --adapter, NAME=PATH or PATH, by name. UserError for a name that appears twice, or is empty."""
    found: dict[str, Path] = {}
    for pair in pairs:
        name, given, path = pair.partition("=")
        name, path = (name, Path(path)) if given else (Path(pair).resolve().name, Path(pair))
        if not name or not str(path) or name in found:
            raise UserError(f"--adapter {pair}: wanted NAME=PATH, with a name of its own for each adapter")
        found[name] = path
    return found
