"""The chat template and a sample transcript beside an export: what a server must reproduce, token by token."""

import json
import re
from pathlib import Path

from lorawgpu.chat.template import resolve_template
from lorawgpu.config.schema import load_config
from lorawgpu.errors import UserError
from lorawgpu.export.probe import Probe
from lorawgpu.export.source import ExportSource
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.prompts import Prompts
from lorawgpu.generate.sampling import Sampling

TRANSCRIPT_FILE = "sample_transcript.json"
QUESTION = "Hello! Please introduce yourself in one sentence."
TOKENS = 48  # of the answer, at most
ABOUT = (
    "The likeliest token each time (temperature 0). A server that answers otherwise renders another prompt, tokenises "
    "it otherwise, or computes another model: compare prompt_ids first. A blank at the end of a generation prompt is "
    "left out: in training it was the beginning of the answer's first word."
)


def prompts_of(source: ExportSource) -> Prompts:
    """The model's tokenizer, with the template of the run that trained the adapter, else the model's own.

    UserError when the model has no tokenizer.
    """
    tokenizer = source.checkpoint.tokenizer()
    named = (None, None)
    for folder in (source.folder, source.folder.parent):  # a run folder holds its config; its checkpoints are below
        if (folder / "config.yaml").is_file():
            config = load_config(folder / "config.yaml")
            named = (config.chat_template, config.chat_template_jinja)
            break
    return Prompts(tokenizer, resolve_template(*named, tokenizer.chat_template, tokenizer.special_tokens))


def write_sample(folder: Path, source: ExportSource, probe: Probe) -> str:
    """Write both files; returns what was not written and why, or nothing."""
    try:
        prompts = prompts_of(source)
    except UserError as error:
        return f"no chat template and no sample transcript: {error}"
    messages, text = None, QUESTION
    if template := prompts.template:
        (folder / CHAT_TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
        messages = [{"role": "user", "content": QUESTION}]
        text = template.render(messages, add_generation_prompt=True).rstrip(" ")
    ids, limit = prompts.chat(messages) if messages else prompts.raw(text), source.config.max_position_embeddings
    if len(ids) > limit:
        return f"no sample transcript: its prompt has {len(ids)} tokens, the model's context is {limit}"
    answer, ended = _answer(probe, ids, prompts.stop_ids(source.config.eos_token_ids))
    transcript = {
        "about": ABOUT,
        "base_model": source.base_name,
        "messages": messages,
        "prompt": text,
        "prompt_ids": ids,
        "answer": prompts.tokenizer.decode(answer, skip_special=True),
        "answer_ids": answer,
        "ended": ended,
    }
    lines = json.dumps(transcript, indent=1, ensure_ascii=False)
    lines = re.sub(r"\[\n[\d,\s]+\]", lambda ids: " ".join(ids[0].split()), lines)  # ids on one line
    (folder / TRANSCRIPT_FILE).write_text(lines + "\n", encoding="utf-8")
    return "" if template else "no chat template: the model has none, so the sample transcript completes a text"


def _answer(probe: Probe, prompt: list[int], ends: frozenset) -> tuple[list[int], bool]:
    """The greedy answer, as far as the model's context goes, and whether the model ended it itself."""
    context = min(len(prompt) + TOKENS, probe.source.config.max_position_embeddings)
    decoder = Decoder(probe.device, probe.model, probe.engine.adapter, context=context, kernels=probe.kernels)
    generator = Generator(decoder, ends)
    answer = [token for _, token in generator.stream([prompt], Sampling(), TOKENS)]
    return answer, generator.reasons[0] == "stop"
