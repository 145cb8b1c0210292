"""The data of `evaluate --data` and `export --data`: read as a training run would read them, and their loss."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.batching import token_capacity
from lorawgpu.data.dataset import Concat, Data
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import Evaluation, evaluate_source
from lorawgpu.generate.prompts import special_tokens_of, template_arguments, template_choice
from lorawgpu.gpu.submit_budget import first_rate, flops_per_submit
from lorawgpu.train.setup import load_data, text_setup_of_model
from lorawgpu.weights.loader import Checkpoint

ROWS = 2048  # tokens evaluated at a time, or the length of a longer sample


def evaluation_config(
    data: str,
    model: str,
    checkpoint: Checkpoint,
    adapter: str | None,
    sequence_len: int | None = None,
    chat_template: str | None = None,
    template_kwargs: str | None = None,
) -> TrainConfig:
    """The config with which a training run would read the data; the defaults come from the schema and the adapter."""
    folder = Path(adapter) if adapter is not None else None
    choice = template_choice(folder, chat_template, template_arguments(template_kwargs))
    return TrainConfig(
        base_model=model,
        datasets=[{"path": data}],
        sequence_len=sequence_len or checkpoint.config.max_position_embeddings,
        excess_length_strategy="truncate",
        chat_template=choice.name,
        chat_template_jinja=choice.jinja,
        chat_template_kwargs=choice.arguments,
        special_tokens=special_tokens_of(folder),
    )


@dataclass(frozen=True)
class HeldOut:
    """Tokenized samples; `config`: how they were read."""

    config: TrainConfig
    data: Data
    source: Concat

    @property
    def longest(self) -> int:
        return int(self.source.lengths.max())

    @property
    def tokens(self) -> int:
        return int(self.source.lengths.sum())

    def engine(self, device, model, layout=None, tensors=None, kernels=None) -> Engine:
        """An engine with room for the longest sample."""
        rows = token_capacity(1, max(self.longest, min(self.tokens, ROWS)))
        submit = flops_per_submit(first_rate(device), self.config.max_dispatch_ms)
        options = Options(rows, self.longest, flops_per_submit=submit)
        engine = Engine(device, model, options, layout, tensors, kernels=kernels)
        engine.plan("eval", rows)
        return engine

    def loss(self, engine: Engine, adapter: bool = True, advance: Callable[[int], None] | None = None) -> Evaluation:
        return evaluate_source(engine, self.source, adapter, advance)


def read_held_out(config: TrainConfig, checkpoint: Checkpoint) -> HeldOut:
    """Read and tokenize the data of a config. UserError, with file and line, for bad data."""
    data = load_data(config, text_setup_of_model(config, checkpoint), purpose="evaluate")
    return HeldOut(config, data, Concat(data.train))
