"""Asking a model: ids of prompts in, text out. The Python API, the samples of a run and exports ask through this."""

from collections.abc import Generator as GeneratorType
from collections.abc import Sequence
from dataclasses import dataclass

from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.prompts import Prompts, TextStream
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Device, KernelCache
from lorawgpu.gpu.tensor import padded
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.ops.matvec import MAX_ROWS
from lorawgpu.weights.device_model import Model


@dataclass(frozen=True)
class Answer:
    """`reason`: why it ended, "stop" (an end token, which is not in `ids`), "length" or "context"."""

    ids: list[int]
    text: str
    reason: str


class Answerer:
    """A model with the adapter that it is asked with, or bare, and its tokenizer and chat template.

    The decoder is made when it is first needed, and again when a prompt needs more room; `context_step`: its context
    is rounded up to a multiple of this, so that the next prompt fits too.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        prompts: Prompts,
        adapter: AdapterBuffers | None = None,
        kernels: KernelCache | None = None,
        context_step: int = 1,
    ):
        self.device, self.model, self.prompts, self.adapter = device, model, prompts, adapter
        self.kernels, self.context_step = kernels, context_step
        self._decoder: Decoder | None = None

    def decoder(self, sequences: int, context: int) -> Decoder:
        """A decoder of at least so many sequences and tokens, as far as the model's context goes."""
        limit, have = self.model.config.max_position_embeddings, self._decoder
        if have is None or len(have.held) < sequences or have.context < min(limit, context):
            sequences = max(sequences, len(have.held) if have else 1)
            context = min(limit, padded(context, self.context_step))
            have = self._decoder = None  # its memory is free before the next one takes its own
            self._decoder = Decoder(
                self.device, self.model, self.adapter, context=context, sequences=sequences, kernels=self.kernels
            )
        return self._decoder

    def _generator(self, sequences: int, context: int) -> Generator:
        return Generator(self.decoder(sequences, context), self.prompts.stop_ids(self.model.config.eos_token_ids))

    def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        context: int | None = None,
        reuse: bool = False,
        strip: bool = False,
    ) -> GeneratorType[str, None, str]:
        """The answer in pieces of whole characters, as they are made. Returns why it ended.

        context: tokens that the cache is to hold (default: what this answer needs); reuse: as `Decoder.start`; strip:
        without a blank at the start. UserError for a prompt beyond the model's context.
        """
        run = self._generator(1, context or len(prompt) + max_new_tokens)
        text = TextStream(self.prompts.tokenizer, strip)
        for _, token in run.stream([prompt], sampling, max_new_tokens, reuse=reuse):
            if piece := text.push(token):
                yield piece
        if rest := text.finish():
            yield rest
        return run.reasons[0]

    def answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling, max_new_tokens: int) -> list[Answer]:
        """All answers, several at once. Prompt i draws from stream i of the seed: no answer depends on another.

        UserError for a prompt beyond the model's context, CheckFailed for a value that is not finite.
        """
        answers = []
        for first in range(0, len(prompts), MAX_ROWS):
            some = prompts[first : first + MAX_ROWS]
            run = self._generator(len(some), max(map(len, some)) + max_new_tokens)
            ids: list[list[int]] = [[] for _ in some]
            for b, token in run.stream(some, sampling, max_new_tokens, range(first, first + len(some))):
                ids[b].append(token)
            texts = [self.prompts.tokenizer.decode(i, skip_special=True) for i in ids]
            answers += map(Answer, ids, texts, run.reasons)
        return answers
