"""The answers to `sample_prompts` while a model trains, always the likeliest token, for the log and the report."""

import numpy as np

from lorawgpu.engine.engine import Engine
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.prompts import Prompts
from lorawgpu.generate.sampling import Sampling
from lorawgpu.train.setup import Run

TOKENS = 64  # of an answer, at most


class Samples:
    """Prompts as the model is asked them, and a decoder that sees the adapter as it is now.

    UserError when there are prompts and no tokenizer, or one leaves no room for an answer.
    """

    def __init__(self, run: Run, engine: Engine):
        self.engine, self.words = engine, run.words
        self.prompts = run.config.sample_prompts if engine.exchange.leads else []
        if not self.prompts:
            return
        if self.words.tokenizer is None:
            raise UserError(f"sample_prompts need the model's tokenizer: {self.words.missing}")
        asking = Prompts(self.words.tokenizer, self.words.template)
        ask = asking.raw if asking.template is None else lambda text: asking.chat([{"role": "user", "content": text}])
        self.ids = [ask(prompt) for prompt in self.prompts]
        self.ends = asking.stop_ids(run.checkpoint.config.eos_token_ids)
        longest, limit = max(map(len, self.ids)), run.checkpoint.config.max_position_embeddings
        if longest >= limit:
            raise UserError(f"one of sample_prompts has {longest} tokens, the model's context is {limit}: shorten it")
        context = min(longest + TOKENS, limit)
        self.decoder = Decoder(engine.device, engine.model, engine.adapter, context=context, kernels=engine.kernels)
        self.decoder.prepare()  # a plan of the memory counts it

    def answers(self) -> list[dict[str, str]]:
        """One {"prompt", "text"} a prompt; the text says so where a value was not finite."""
        return [{"prompt": p, "text": self._answer(ids)} for p, ids in zip(self.prompts, self.ids, strict=True)]

    def base_answers(self) -> list[dict[str, str]]:
        """Those of the bare base model: the decoder reads the parameters, and they are zero meanwhile."""
        kept = self.engine.tensors()
        self.engine.load("params", {name: np.zeros_like(tensor) for name, tensor in kept.items()})
        try:
            return self.answers()
        finally:
            self.engine.load("params", kept)

    def _answer(self, prompt: list[int]) -> str:
        try:
            chosen = Generator(self.decoder, self.ends).stream([prompt], Sampling(), TOKENS)
            answer = [token for _, token in chosen]
        except CheckFailed as error:
            return f"(no answer: {error})"
        text = self.words.tokenizer.decode(answer, skip_special=True)
        return text if self.words.template is None else text.strip()  # the answer's first word brings its blank along
