"""Token ids of prompts in, text out. Used by the Python API, the samples of a run, and exports."""

from collections.abc import Callable, Sequence
from collections.abc import Generator as GeneratorType
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
    """`reason`: why it ended: "stop" (an end token, which is not in `ids`), "length" or "context"."""

    ids: list[int]
    text: str
    reason: str


class Answerer:
    """A model, with an adapter or without, and its tokenizer and chat template.

    The decoder is created on first use, and replaced if a prompt needs more room. `context_step`: its context is
    rounded up to a multiple of this, so that the next prompt fits too.
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
        """A decoder for at least this many sequences and tokens, within the model's context."""
        limit, have = self.model.config.max_position_embeddings, self._decoder
        if have is None or len(have.held) < sequences or have.context < min(limit, context):
            sequences = max(sequences, len(have.held) if have else 1)
            context = min(limit, padded(context, self.context_step))
            have = self._decoder = None  # free its memory before the next one is allocated
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
        """Yields the answer in pieces of whole characters, as it is generated. Returns why it ended.

        context: size of the KV cache in tokens (default: what this answer needs); reuse: as for `Decoder.start`;
        strip: drop a space at the start. Raises UserError for a prompt beyond the model's context.
        """
        run = self._generator(1, context or len(prompt) + max_new_tokens)
        text = TextStream(self.prompts.tokenizer, strip)
        for _, token in run.stream([prompt], sampling, max_new_tokens, reuse=reuse):
            if piece := text.push(token):
                yield piece
        if rest := text.finish():
            yield rest
        return run.reasons[0]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        advance: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """All answers, computed in batches. Prompt i draws from stream i of the seed, so no answer depends on another.

        advance: called with a number of new tokens; what it raises ends the generation. Raises UserError for a prompt
        beyond the model's context, and CheckFailed for a value that is not finite.
        """
        answers = []
        for first in range(0, len(prompts), MAX_ROWS):
            batch = prompts[first : first + MAX_ROWS]
            run = self._generator(len(batch), max(map(len, batch)) + max_new_tokens)
            ids: list[list[int]] = [[] for _ in batch]
            for b, token in run.stream(batch, sampling, max_new_tokens, range(first, first + len(batch))):
                ids[b].append(token)
                if advance:
                    advance(1)
            texts = [self.prompts.tokenizer.decode(i, skip_special=True) for i in ids]
            answers += map(Answer, ids, texts, run.reasons)
        return answers
