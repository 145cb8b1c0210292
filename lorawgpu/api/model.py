"""The Python interface: `lorawgpu.load(model, adapter)` and what can be asked of a loaded model.

llm = lorawgpu.load("HuggingFaceTB/SmolLM2-135M-Instruct", adapter="out/mine")
print(llm.generate("What is a llama?", temperature=0.7, top_p=0.9))
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorawgpu.api.arguments import is_conversation, messages_of, records_of, sampling_of, token_ids, whole_number
from lorawgpu.data.batching import Sample, flatten, token_capacity
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.formats import detect_type
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.errors import UserError
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.prompts import Prompts, TextStream, template_for
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Device, KernelCache, open_device
from lorawgpu.gpu.tensor import padded
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.ops.matvec import MAX_ROWS
from lorawgpu.weights.device_model import Model, load_model
from lorawgpu.weights.loader import Checkpoint, open_checkpoint

MAX_NEW_TOKENS = 256
UNBOUNDED = 1 << 30  # tokens: the context is checked by its own name, not as a setting of a config
CONTEXT_STEP = 512  # caches are made a little larger than asked for, so that the next prompt fits too
Prompt = str | list  # text, or a conversation: a list of {"role", "content"}


@dataclass
class Ended:
    """Why an answer ended: "stop" (the model's end token), "length" (max_new_tokens) or "context"; None so far."""

    reason: str | None = None


def load(
    model: str | Path,
    adapter: str | Path | None = None,
    device: str | int | Device | None = "auto",
    chat_template: str | None = None,
) -> "LoadedModel":
    """A model with its adapter on a device, ready to be asked.

    model: a Hugging Face folder, a .gguf file or a hub name; adapter: a PEFT directory; device: auto, cpu, gpu, an
    index, a part of a name (None: $LORAWGPU_DEVICE, then auto), or one that is open; chat_template: a built-in's name,
    a Jinja file or the text (default: what the adapter was trained with, else the model's). UserError, DeviceError.
    """
    checkpoint = open_checkpoint(model)
    folder = None if adapter is None else Path(adapter)
    lora = None if adapter is None else read_adapter(adapter, checkpoint.config)
    opened = device if isinstance(device, Device) else open_device(None if device is None else str(device))
    return LoadedModel(opened, checkpoint, lora, (folder, chat_template))


class LoadedModel:
    """One model and at most one adapter. Its weights are on the device once, whatever it is asked for."""

    def __init__(
        self,
        device: Device,
        checkpoint: Checkpoint,
        adapter: tuple | None = None,
        template: tuple[Path | None, str | None] = (None, None),
        kernels: KernelCache | None = None,
    ):
        """adapter: (LoraConfig, tensors by PEFT name), as `model.adapter.read_adapter` returns; template: the
        adapter's folder and the template given, as `generation.text.template_for` takes them."""
        self.device, self.checkpoint, self.config = device, checkpoint, checkpoint.config
        self.kernels = kernels or KernelCache(device)
        self.layout, self.tensors, self.buffers = None, None, None
        if adapter:
            lora, self.tensors = adapter
            self.layout = AdapterLayout(lora, self.config)
            flat = device.upload(self.layout.flatten(self.tensors), label="adapter", kind="adapter")
            self.buffers = AdapterBuffers(self.layout, flat)
        self._template, self._prompts = template, None
        self._decoders: dict[bool, Decoder] = {}
        self._engine: Engine | None = None

    @cached_property
    def model(self) -> Model:
        """The weights on the device, uploaded when they are first needed: a wrong prompt is told before that."""
        return load_model(self.device, self.checkpoint)

    @property
    def prompts(self) -> Prompts:
        """Tokenizer and chat template. UserError when the model has no tokenizer."""
        if self._prompts is None:
            tokenizer = self.checkpoint.tokenizer()
            self._prompts = Prompts(tokenizer, template_for(tokenizer, *self._template))
        return self._prompts

    def encode(self, prompt: Prompt, raw: bool = False, place: tuple[str, int] = ("prompt", 1)) -> list[int]:
        """Ids of a prompt: text is a user's turn where the model has a chat template, unless it is to be raw.

        UserError, with `place`, for what is neither a text nor a conversation of known roles.
        """
        prompt = messages_of(prompt, raw, place)
        if isinstance(prompt, str) and (raw or self.prompts.template is None):
            return self.prompts.raw(prompt)
        return self.prompts.chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

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
        """The answer in pieces, as they are made. UserError at the first for what is asked wrongly.

        sampling, settings: as `generate`;
        context: tokens that the cache is to hold (default: what this answer needs; the model's limit bounds both);
        reuse: keep what the cache holds of the prompt's beginning, for a conversation that goes on; ended: told why.
        """
        sampling, max_new_tokens = sampling_of(sampling, settings), whole_number("max_new_tokens", max_new_tokens)
        context = None if context is None else whole_number("context", context)
        ids = self.encode(prompt, raw)
        decoder = self._decoder(1, [ids], max_new_tokens, use_adapter, context)
        generator = Generator(decoder, self.prompts.stop_ids(self.config.eos_token_ids))
        text = TextStream(self.prompts.tokenizer, strip=not raw)
        for _, token in generator.stream([ids], sampling, max_new_tokens, reuse=reuse):
            if piece := text.push(token):
                yield piece
        if rest := text.finish():
            yield rest
        if ended:
            ended.reason = generator.reasons[0]

    def generate(
        self,
        prompt: Prompt | list[Prompt],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        raw: bool = False,
        use_adapter: bool = True,
        ended: list[Ended] | None = None,
        **settings: float,
    ) -> str | list[str]:
        """The answer to a prompt (text, or a conversation), or the answers to a list of prompts, several at once.

        settings: temperature, top_k, top_p, min_p, repetition_penalty and seed, in place of those of `sampling`
        (`Sampling` says what they do and their defaults). UserError for what is asked wrongly.
        Prompt number i of a list draws from stream i of the seed: its answer does not depend on the others.
        ended: gets an Ended for each answer, in their order.
        """
        sampling, max_new_tokens = sampling_of(sampling, settings), whole_number("max_new_tokens", max_new_tokens)
        several = isinstance(prompt, list) and not is_conversation(prompt)
        asked = [self.encode(p, raw, ("prompt", i)) for i, p in enumerate(prompt if several else [prompt], 1)]
        answers = []
        for first in range(0, len(asked), MAX_ROWS):
            some = asked[first : first + MAX_ROWS]
            texts, reasons = self._answers(some, first, max_new_tokens, sampling, raw, use_adapter)
            answers += texts
            if ended is not None:
                ended += map(Ended, reasons)
        return answers if several else answers[0]

    def _answers(self, asked, first, max_new_tokens, sampling, raw, use_adapter) -> tuple[list[str], list]:
        decoder = self._decoder(len(asked), asked, max_new_tokens, use_adapter, None)
        generator = Generator(decoder, self.prompts.stop_ids(self.config.eos_token_ids))
        ids: list[list[int]] = [[] for _ in asked]
        streams = range(first, first + len(asked))
        for b, token in generator.stream(asked, sampling, max_new_tokens, streams):
            ids[b].append(token)
        texts = [self.prompts.tokenizer.decode(i, skip_special=True) for i in ids]
        return [t if raw else t.removeprefix(" ") for t in texts], generator.reasons

    def _decoder(self, sequences, asked, max_new_tokens, use_adapter, context) -> Decoder:
        """A decoder with room for these prompts and their answers; the last one where it is large enough."""
        use_adapter = use_adapter and self.buffers is not None
        limit, longest = self.config.max_position_embeddings, max(map(len, asked))
        if longest > limit:
            raise UserError(f"the prompt has {longest} tokens, the model's context is {limit}: shorten it")
        wanted = min(limit, context or longest + max_new_tokens)
        have = self._decoders.get(use_adapter)
        if have is None or len(have.held) < sequences or have.context < wanted:
            self._decoders.pop(use_adapter, None)
            room, count = min(limit, padded(wanted, CONTEXT_STEP)), max(sequences, len(have.held) if have else 1)
            adapter = self.buffers if use_adapter else None
            have = Decoder(self.device, self.model, adapter, context=room, sequences=count, kernels=self.kernels)
            self._decoders[use_adapter] = have
        return have

    # Scoring

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of `ids`, float32 [len(ids), V]. UserError for what is no token, and beyond the context."""
        ids = token_ids(ids, self.config.vocab_size, self.config.max_position_embeddings)
        sample = Sample(ids, np.full(len(ids), -100, np.int32))
        capacity = token_capacity(1, len(ids))
        return self._scorer(len(ids)).logits(flatten([sample], capacity), np.arange(len(ids)))

    def loss(self, records: Sequence[str | dict]) -> float:
        """Mean cross-entropy over all target tokens of records, masked as in training.

        A record is what a data set may hold ({"messages": ...}, {"text": ...}, {"input_ids", "labels"}, ...), or a
        text. UserError for one that trains nothing or is longer than the model's context.
        """
        samples = [self._sample(number, record) for number, record in enumerate(records_of(records), 1)]
        return evaluate_source(self._scorer(max(map(len, samples))), _Samples(samples)).loss

    def _sample(self, number: int, record: dict) -> Sample:
        settings = EncodeSettings(UNBOUNDED, "raise", False, ("assistant",))
        kind = detect_type(record, ("records", number))
        tokenizer, template = (
            (None, None) if kind == "pretokenized" else (self.prompts.tokenizer, self.prompts.template)
        )
        encoder = Encoder(kind, settings, tokenizer, template, self.config.vocab_size)
        sample, limit = encoder("records", number, record).sample, self.config.max_position_embeddings
        if len(sample) > limit:
            raise UserError(f"records, line {number}: {len(sample)} tokens, the model's context is {limit}: shorten it")
        return sample

    def _scorer(self, tokens: int) -> Engine:
        if self._engine is None or self._engine.options.capacity < tokens:
            options = Options(token_capacity(1, tokens), token_capacity(1, tokens))
            self._engine = Engine(self.device, self.model, options, self.layout, self.tensors, kernels=self.kernels)
        return self._engine


class _Samples(list):
    """Samples as evaluate_source reads them."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(s) for s in self])
