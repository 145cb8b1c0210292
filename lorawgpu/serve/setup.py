"""Opening a service: the model on its device, the threads, and the adapters that are there from the start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorawgpu.chat.arguments import Arguments
from lorawgpu.errors import UserError
from lorawgpu.generate.batch import cache_for, most_tokens
from lorawgpu.generate.plans import Shared
from lorawgpu.gpu import Device, KernelCache, padded
from lorawgpu.model.kv_cache import SPAN_ALIGN
from lorawgpu.ops.decode_state import MAX_SEQUENCES
from lorawgpu.serve.answers import Service
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.limits import CACHE, CONTEXT, QUEUE, SEQUENCES
from lorawgpu.serve.models import Models
from lorawgpu.serve.scheduler import Scheduler
from lorawgpu.serve.text import Texts
from lorawgpu.weights.device_model import Model
from lorawgpu.weights.loader import Checkpoint

PREFILL_ROWS = 512  # tokens of prompts at a time: the answers that are being generated wait for no more


@dataclass(frozen=True)
class Sizes:
    """`context`: tokens of a prompt and its answer; `cache`: of all that are in work; `sequences`: answers at once;
    `waiting`: answers that may wait. None: as much as the model and the device allow, up to the defaults."""

    context: int | None = None
    cache: int | None = None
    sequences: int = SEQUENCES
    waiting: int = QUEUE

    def fitted(self, device: Device, checkpoint: Checkpoint) -> "Sizes":
        """With numbers. UserError for a context beyond the model's, or the cache's."""
        limit = checkpoint.config.max_position_embeddings
        cache = padded(self.cache or min(CACHE, most_tokens(device, checkpoint.config)), SPAN_ALIGN)
        context = self.context or min(limit, CONTEXT, cache)
        if context > limit:
            raise UserError(f"--context {context}: the model's context is {limit:,}")
        if context > cache:
            raise UserError(f"--context {context}: the cache has room for {cache:,} tokens; raise --cache-tokens")
        return Sizes(context, cache, self.sequences, self.waiting)


def open_service(
    checkpoint: Checkpoint,
    shared: Shared,
    name: str,
    sizes: Sizes,
    failed: Callable[[BaseException], None],
    template: tuple[str | None, Arguments | None] = (None, None),
) -> Service:
    """A service whose threads run. `sizes`: fitted; `template`: as for `Models`; `failed`: as for `Scheduler`."""
    texts = Texts(stopped=lambda choices: scheduler.cancel(choices))
    scheduler = Scheduler(sizes.cache, sizes.sequences, sizes.waiting, texts.deliver, failed)
    models = Models(checkpoint, shared, scheduler, name, *template)
    texts.start()
    scheduler.start()
    return Service(models, scheduler, texts, sizes.context)


def share(device: Device, checkpoint: Checkpoint, model: Model, sizes: Sizes, kernels: KernelCache | None) -> Shared:
    """The cache and the buffers that base and adapters share. UserError if the cache does not fit."""
    cache = cache_for(device, checkpoint.config, sizes.cache)
    rows = max(min(PREFILL_ROWS, sizes.context), MAX_SEQUENCES)  # a step's rows have their data in a pass's
    return Shared.create(device, model, cache, sizes.context, rows, kernels)


def load_adapters(service: Service, adapters: dict[str, Path]) -> None:
    """UserError for one that does not fit the model."""
    for name, path in adapters.items():
        try:
            service.models.load(name, path)
        except ApiError as error:
            raise UserError(f"--adapter {name}={path}: {error}") from None
