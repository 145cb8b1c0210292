"""The chat template and a sample transcript beside an export: what a server must reproduce, token by token."""

import json
from dataclasses import dataclass
from pathlib import Path

from lorawgpu.config import load_config
from lorawgpu.data.chat import ChatTemplate, resolve_template
from lorawgpu.data.tokenizer import Tokenizer
from lorawgpu.errors import UserError
from lorawgpu.exporting.hf_files import TEMPLATE_FILE
from lorawgpu.exporting.probe import Probe
from lorawgpu.exporting.source import Source
from lorawgpu.generation.decoder import Decoder

TRANSCRIPT_FILE = "sample_transcript.json"
QUESTION = "Hello! Please introduce yourself in one sentence."
TOKENS = 48  # of the answer, at most


@dataclass(frozen=True)
class Words:
    """How the model is spoken to; `template` is None where it completes text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def words_of(source: Source) -> Words:
    """The model's tokenizer, and the template of the run that trained the adapter, else the model's own.

    UserError when the model has no tokenizer.
    """
    tokenizer = source.checkpoint.tokenizer()
    named = (None, None)
    for folder in (source.folder, source.folder.parent):  # a run folder holds its config; its checkpoints are below
        if (folder / "config.yaml").is_file():
            config = load_config(folder / "config.yaml")
            named = (config.chat_template, config.chat_template_jinja)
            break
    return Words(tokenizer, resolve_template(*named, tokenizer.chat_template, tokenizer.special_tokens))


def write_sample(folder: Path, source: Source, probe: Probe) -> str:
    """Write both files; returns what was not written and why, or nothing."""
    try:
        words = words_of(source)
    except UserError as error:
        return f"no chat template and no sample transcript: {error}"
    messages, text = [{"role": "user", "content": QUESTION}], QUESTION
    if words.template:
        (folder / TEMPLATE_FILE).write_text(words.template.source, encoding="utf-8")
        text = words.template.render(messages, add_generation_prompt=True)
    ids = words.tokenizer.encode(text, add_special=words.template is None)
    answer, ended = _answer(probe, ids, {*source.config.eos_token_ids, words.tokenizer.eos_id})
    transcript = {
        "about": "The likeliest token each time (temperature 0). A server that answers otherwise renders another "
        "prompt, tokenises it otherwise, or computes another model: compare prompt_ids first.",
        "base_model": source.base_name,
        "messages": messages if words.template else None,
        "prompt": text,
        "prompt_ids": ids,
        "answer": words.tokenizer.decode(answer, skip_special=True),
        "answer_ids": answer,
        "ended": ended,
    }
    (folder / TRANSCRIPT_FILE).write_text(json.dumps(transcript, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return "" if words.template else "no chat template: the model has none, so the sample transcript completes a text"


def _answer(probe: Probe, prompt: list[int], ends: set) -> tuple[list[int], bool]:
    """The greedy answer, and whether the model ended it itself."""
    decoder = Decoder(
        probe.device, probe.model, probe.engine.adapter, context=len(prompt) + TOKENS, kernels=probe.kernels
    )
    decoder.start([prompt])
    answer = []
    while len(answer) < TOKENS:
        token = int(decoder.read_logits(1)[0].argmax())
        if token in ends:
            return answer, True
        answer.append(token)
        decoder.extend([[token]])
    return answer, False
