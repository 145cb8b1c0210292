"""The answers to `sample_prompts` while a model trains, always the likeliest token, for the log and the report."""

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
        self.prompts, self.text = run.config.sample_prompts, run.text
        if not self.prompts:
            return
        if self.text.tokenizer is None:
            raise UserError(f"sample_prompts need the model's tokenizer: {self.text.missing}")
        asking = Prompts(self.text.tokenizer, self.text.template)
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

    def _answer(self, prompt: list[int]) -> str:
        try:
            chosen = Generator(self.decoder, self.ends).stream([prompt], Sampling(), TOKENS)
            answer = [token for _, token in chosen]
        except CheckFailed as error:
            return f"(no answer: {error})"
        text = self.text.tokenizer.decode(answer, skip_special=True)
        return text if self.text.template is None else text.strip()  # the answer's first word brings its blank along
