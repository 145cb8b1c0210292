"""Greedy answers to `sample_prompts` during training, for the log and the report."""

from collections.abc import Callable

from lorawgpu.engine.engine import Engine
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.generate.answer import Answerer
from lorawgpu.generate.prompts import Prompts
from lorawgpu.generate.sampling import Sampling
from lorawgpu.lora.peft_dir import idle_adapter
from lorawgpu.train.setup import Run

TOKENS = 64  # maximum length of an answer
Advance = Callable[[int], None]


class Samples:
    """The encoded prompts, and a decoder that reads the adapter in its current state.

    Raises UserError if there are prompts but no tokenizer, or if a prompt leaves no room for an answer.
    """

    def __init__(self, run: Run, engine: Engine):
        self.engine, self.text, self.lora, self.checkpoint = engine, run.text, run.lora, run.checkpoint
        self.prompts = run.config.sample_prompts if engine.exchange.leads else []
        if not self.prompts:
            return
        if self.text.tokenizer is None:
            raise UserError(f"sample_prompts need the model's tokenizer: {self.text.missing}")
        prompts = Prompts(self.text.tokenizer, self.text.template)
        self.ids = [prompts.encode(prompt) for prompt in self.prompts]
        longest, limit = max(map(len, self.ids)), run.checkpoint.config.max_position_embeddings
        if longest >= limit:
            raise UserError(f"one of sample_prompts has {longest} tokens, the model's context is {limit}: shorten it")
        self.answerer = Answerer(engine.device, engine.model, prompts, engine.adapter, engine.kernels)
        self.answerer.decoder(1, longest + TOKENS).prepare()  # so that the planned memory includes it

    def answers(self, advance: Advance | None = None) -> list[dict[str, str]]:
        """One {"prompt", "text"} per prompt; the text says so if a value was not finite.

        advance: called with the number of the prompt (from 1) after each token; what it raises is passed on.
        """
        return [
            {"prompt": prompt, "text": self._answer(ids, advance and (lambda tokens, number=number: advance(number)))}
            for number, (prompt, ids) in enumerate(zip(self.prompts, self.ids, strict=True), 1)
        ]

    def base_answers(self, advance: Advance | None = None) -> list[dict[str, str]]:
        """The base model's answers: the adapter's parameters have no effect while the decoder reads them."""
        kept, checkpoint = self.engine.tensors(), self.checkpoint
        self.engine.load("params", idle_adapter(self.lora, checkpoint.config, checkpoint.rows))
        try:
            return self.answers(advance)
        finally:
            self.engine.load("params", kept)

    def _answer(self, prompt: list[int], advance: Advance | None) -> str:
        try:
            (answer,) = self.answerer.answers([prompt], Sampling(), TOKENS, advance)
        except CheckFailed as error:
            return f"(no answer: {error})"
        # the first token of the answer starts with a space
        return answer.text if self.text.template is None else answer.text.strip()
