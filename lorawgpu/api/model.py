"""The Python API: `lorawgpu.load(model, adapter)`, and the methods of a loaded model.

llm = lorawgpu.load("HuggingFaceTB/SmolLM2-135M-Instruct", adapter="out/mine")
print(llm.generate("What is a llama?", temperature=0.7, top_p=0.9))
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorawgpu.api.arguments import is_conversation, messages_of, records_of, sampling_of, token_ids, whole_number
from lorawgpu.chat.arguments import Arguments
from lorawgpu.config.model_options import kept_options
from lorawgpu.data.batching import Sample, SampleList, flatten, token_capacity
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.formats import detect_type
from lorawgpu.data.workers import encode_record, start_worker
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.engine.readings import settled
from lorawgpu.errors import UserError
from lorawgpu.generate.answer import Answerer
from lorawgpu.generate.prompts import Prompts, special_tokens_of, template_for
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Device, KernelCache, open_device
from lorawgpu.lora.base_name import base_for
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.weights.device_model import Model, load_model
from lorawgpu.weights.extended import extended_for
from lorawgpu.weights.gguf_checkpoint import lost_window
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.options import ModelOptions, check_options

MAX_NEW_TOKENS = 256
UNBOUNDED = 1 << 30  # tokens: the model's context is checked here, not as `sequence_len`
CONTEXT_STEP = 512  # KV caches are a little larger than needed, so that the next prompt fits too
Prompt = str | list  # text, or a conversation: a list of {"role", "content"}


@dataclass
class Ended:
    """Why an answer ended: "stop" (the model's end token), "length" (max_new_tokens) or "context"; None until then."""

    reason: str | None = None


def load(
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    device: str | int | Device | None = "auto",
    chat_template: str | None = None,
    chat_template_kwargs: Arguments | None = None,
    model_options: ModelOptions | None = None,
) -> "LoadedModel":
    """Load a model and, optionally, an adapter onto a device.

    model: a Hugging Face folder, a .gguf file or a hub name (None: the adapter's base model); adapter: a PEFT
    directory; device: auto, cpu, gpu, an index, part of a name (None: $LORAWGPU_DEVICE, then auto), or an open Device;
    chat_template: a built-in name, a Jinja file or the template itself (default: the adapter's, else the model's);
    chat_template_kwargs: variables of the template, such as {"enable_thinking": False} (default: the adapter's);
    model_options: what the model's files leave open, such as {"hidden_act": "relu2"} (default: the adapter's). Raises
    UserError and DeviceError.
    """
    start_worker()
    try:
        options = check_options(model_options)
    except ValueError as error:
        raise UserError(f"model_options: {error}") from None
    checkpoint = extended_for(open_checkpoint(base_for(adapter, model), options, kept_options(adapter)), adapter)
    folder = None if adapter is None else Path(adapter)
    lora = None if adapter is None else read_adapter(adapter, checkpoint.config)
    opened = device if isinstance(device, Device) else open_device(None if device is None else str(device))
    return LoadedModel(opened, checkpoint, lora, (folder, chat_template, chat_template_kwargs))


class LoadedModel:
    """One model and at most one adapter. All methods share one copy of the weights on the device."""

    def __init__(
        self,
        device: Device,
        checkpoint: Checkpoint,
        adapter: tuple | None = None,
        template: tuple[Path | None, str | None, Arguments | None] = (None, None, None),
        kernels: KernelCache | None = None,
    ):
        """adapter: (LoraConfig, tensors by PEFT name), as `lora.peft_dir.read_adapter` returns; template: the
        adapter's folder, a template and its arguments, as for `generate.prompts.template_for`."""
        self.device, self.checkpoint, self.config = device, checkpoint, checkpoint.config
        self.kernels = kernels or KernelCache(device)
        self.layout, self.tensors, self.buffers = None, None, None
        if adapter:
            lora, self.tensors = adapter
            self.layout = AdapterLayout(lora, self.config)
            self.buffers = AdapterBuffers.create(device, self.layout, self.tensors)
        self._template = template
        self._answerers: dict[bool, Answerer] = {}
        self._engine: Engine | None = None
        self._warned = False

    @cached_property
    def model(self) -> Model:
        """The weights on the device, uploaded on first use, so that a bad prompt is reported before that."""
        return load_model(self.device, settled(self.device, self.checkpoint))

    @cached_property
    def prompts(self) -> Prompts:
        """Tokenizer and chat template. Raises UserError if the model has no tokenizer."""
        tokenizer = self.checkpoint.tokenizer().with_special_tokens(special_tokens_of(self._template[0]))
        return Prompts(tokenizer, template_for(tokenizer, *self._template))

    def encode(self, prompt: Prompt, raw: bool = False, place: tuple[str, int] = ("prompt", 1)) -> list[int]:
        """Token ids of a prompt. Text is a user's turn if the model has a chat template and not `raw`.

        Raises UserError, with `place`, if it is neither a string nor a valid conversation.
        """
        return self.prompts.encode(messages_of(prompt, raw, place), raw)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        raw: bool = False,
        use_adapter: bool = True,
        context: int | None = None,
        reuse: bool = False,
        ended: Ended | None = None,
        **settings: float,
    ) -> Iterator[str]:
        """Yields the answer in pieces, as it is generated. Raises UserError for bad arguments on the first piece.

        sampling, settings: as for `generate`; context: size of the KV cache in tokens (default: what this answer needs;
        at most the model's context); reuse: keep the part of the cache that matches the beginning of the prompt, for
        the next turn of a conversation; ended: receives the reason why the answer ended.
        """
        sampling, max_new_tokens = sampling_of(sampling, settings), whole_number("max_new_tokens", max_new_tokens)
        context = None if context is None else whole_number("context", context)
        ids = self.encode(prompt, raw)
        answerer = self._answerer([ids], use_adapter)
        reason = yield from answerer.stream(ids, sampling, max_new_tokens, context, reuse, strip=not raw)
        if ended:
            ended.reason = reason

    def generate(
        self,
        prompt: Prompt | list[Prompt],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        raw: bool = False,
        use_adapter: bool = True,
        ended: list[Ended] | None = None,
        advance: Callable[[int], None] | None = None,
        **settings: float,
    ) -> str | list[str]:
        """The answer to a prompt (text or a conversation), or the answers to a list of prompts, computed in batches.

        settings: temperature, top_k, top_p, min_p, repetition_penalty and seed, which override those of `sampling`
        (see `Sampling` for their meaning and defaults). Prompt i of a list draws from stream i of the seed, so its
        answer does not depend on the others. ended: an `Ended` is appended for each answer; advance: called with the
        number of tokens that were generated since its last call. Raises UserError for bad arguments.
        """
        sampling, max_new_tokens = sampling_of(sampling, settings), whole_number("max_new_tokens", max_new_tokens)
        several = isinstance(prompt, list) and not is_conversation(prompt)
        ids = [self.encode(p, raw, ("prompt", i)) for i, p in enumerate(prompt if several else [prompt], 1)]
        answers = self._answerer(ids, use_adapter).answers(ids, sampling, max_new_tokens, advance)
        if ended is not None:
            ended += (Ended(answer.reason) for answer in answers)
        texts = [a.text if raw else a.text.removeprefix(" ") for a in answers]
        return texts if several else texts[0]

    def _answerer(self, prompts: list[list[int]], use_adapter: bool) -> Answerer:
        """The answerer with or without the adapter. Raises UserError for a prompt beyond the model's context."""
        if not prompts:
            raise UserError("prompts is empty; wanted at least one prompt")
        longest, limit = max(map(len, prompts)), self.config.max_position_embeddings
        if longest > limit:
            raise UserError(f"the prompt has {longest} tokens, the model's context is {limit}: shorten it")
        if (note := lost_window(self.checkpoint, longest)) and not self._warned:
            self._warned = True
            print(f"note: {note}", file=sys.stderr)
        adapter = self.buffers if use_adapter else None
        if (key := adapter is not None) not in self._answerers:
            answerer = Answerer(self.device, self.model, self.prompts, adapter, self.kernels, CONTEXT_STEP)
            self._answerers[key] = answerer
        return self._answerers[key]

    # Scoring

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of `ids`, float32 [len(ids), V]. Raises UserError for bad ids, or more than the context."""
        ids = token_ids(ids, self.config.vocab_size, self.config.max_position_embeddings)
        sample = Sample(ids, np.full(len(ids), -100, np.int32))
        capacity = token_capacity(1, len(ids))
        return self._scorer(len(ids)).logits(flatten([sample], capacity), np.arange(len(ids)))

    def loss(self, records: Sequence[str | dict]) -> float:
        """Mean cross-entropy over all target tokens of records, masked as in training.

        A record is a string, or any record of a data set: {"messages": ...}, {"text": ...}, {"input_ids", "labels"},
        ... Raises UserError for a record without target tokens, or one longer than the model's context.
        """
        samples = [self._sample(number, record) for number, record in enumerate(records_of(records), 1)]
        return evaluate_source(self._scorer(max(map(len, samples))), SampleList(samples)).loss

    def _sample(self, number: int, record: dict) -> Sample:
        settings = EncodeSettings(UNBOUNDED, "raise", False, ("assistant",))
        kind = detect_type(record, ("records", number))
        tokenizer, template = (
            (None, None) if kind == "pretokenized" else (self.prompts.tokenizer, self.prompts.template)
        )
        encoder = Encoder(kind, settings, tokenizer, template, self.config.vocab_size)
        sample, limit = encode_record(encoder, ("records", number), record), self.config.max_position_embeddings
        if len(sample) > limit:
            raise UserError(f"records, line {number}: {len(sample)} tokens, the model's context is {limit}: shorten it")
        return sample

    def _scorer(self, tokens: int) -> Engine:
        if self._engine is None or self._engine.options.capacity < tokens:
            options = Options(token_capacity(1, tokens), token_capacity(1, tokens))
            self._engine = Engine(self.device, self.model, options, self.layout, self.tensors, kernels=self.kernels)
        return self._engine
