"""The answers to `sample_prompts` while a model trains, always the likeliest token, for the log and the report."""

from .engine import Engine
from .errors import UserError
from .generation.decoder import Decoder
from .run import Run

TOKENS = 64  # of an answer, at most


class Samples:
    """Prompts as the model is asked them, and a decoder that sees the adapter as it is now.

    UserError when there are prompts and no tokenizer.
    """

    def __init__(self, run: Run, engine: Engine):
        self.prompts, self.words = run.config.sample_prompts, run.words
        if not self.prompts:
            return
        if self.words.tokenizer is None:
            raise UserError(f"sample_prompts need the model's tokenizer: {self.words.missing}")
        self.ids = [self._encode(prompt) for prompt in self.prompts]
        self.ends = set(run.checkpoint.config.eos_token_ids) | {self.words.tokenizer.eos_id}
        context = max(map(len, self.ids)) + TOKENS
        self.decoder = Decoder(engine.device, engine.model, engine.adapter, context=context, kernels=engine.kernels)

    def _encode(self, prompt: str) -> list[int]:
        """As the user's turn of a conversation where the model has a chat template, else as a text begins."""
        tokenizer, template = self.words.tokenizer, self.words.template
        if template is None:
            return tokenizer.encode(prompt, add_special=True)
        text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        return tokenizer.encode(text)

    def answers(self) -> list[dict[str, str]]:
        """One {"prompt", "text"} a prompt; waits for the GPU at every token."""
        return [{"prompt": p, "text": self._answer(ids)} for p, ids in zip(self.prompts, self.ids, strict=True)]

    def _answer(self, prompt: list[int]) -> str:
        self.decoder.start([prompt])
        answer = []
        while len(answer) < TOKENS:
            token = int(self.decoder.read_logits(1)[0].argmax())
            if token in self.ends:
                break
            answer.append(token)
            self.decoder.extend([[token]])
        return self.words.tokenizer.decode(answer, skip_special=True)
