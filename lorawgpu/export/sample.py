"""The chat template and a sample transcript next to an export: a server must reproduce it token by token."""

import json
import re
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.export.hf_files import write_templates
from lorawgpu.export.probe import Probe
from lorawgpu.export.source import ExportSource
from lorawgpu.generate.answer import Answerer
from lorawgpu.generate.sampling import Sampling

TRANSCRIPT_FILE = "sample_transcript.json"
QUESTION = "Hello! Please introduce yourself in one sentence."
TOKENS = 48  # maximum length of the answer
ABOUT = (
    "Greedy decoding (temperature 0). If a server answers differently, it renders or tokenizes the prompt differently, "
    "or runs a different model: compare prompt_ids first. A space at the end of the generation prompt is left out, "
    "because in training it was part of the answer's first token."
)


def write_sample(folder: Path, source: ExportSource, probe: Probe) -> str:
    """Write both files. Returns a note on what was not written and why, or ""."""
    try:
        prompts = source.prompts
    except UserError as error:
        return f"no chat template and no sample transcript: {error}"
    messages, text = None, QUESTION
    try:
        if template := prompts.template:
            write_templates(folder, template.source, template.tool_use)
            messages = [{"role": "user", "content": QUESTION}]
            text = template.render(messages, add_generation_prompt=True).rstrip(" ")
        ids, limit = prompts.chat(messages) if messages else prompts.raw(text), source.config.max_position_embeddings
    except UserError as error:
        return f"no sample transcript: {error}"
    if len(ids) > limit:
        return f"no sample transcript: its prompt has {len(ids)} tokens, the model's context is {limit}"
    answerer = Answerer(probe.device, probe.model, prompts, probe.engine.adapter, probe.kernels)
    (answer,) = answerer.answers([ids], Sampling(), TOKENS)
    transcript = {
        "about": ABOUT,
        "base_model": source.base_name,
        "messages": messages,
        "prompt": text,
        "prompt_ids": ids,
        "answer": answer.text,
        "answer_ids": answer.ids,
        "ended": answer.reason == "stop",
        "stop_ids": sorted(prompts.stop_ids(source.config.eos_token_ids)),
    }
    lines = json.dumps(transcript, indent=1, ensure_ascii=False)
    lines = re.sub(r"\[\n[\d,\s]+\]", lambda ids: " ".join(ids[0].split()), lines)  # ids on one line
    (folder / TRANSCRIPT_FILE).write_text(lines + "\n", encoding="utf-8")
    return "" if template else "no chat template: the model has none, so the sample transcript continues plain text"
