"""Config and tokenizer files that transformers needs next to the weights, for a model that came as GGUF."""

import json
from pathlib import Path

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.hf import to_hf
from lorawgpu.families.registry import FAMILIES
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE, TOOL_USE_FILE
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.save import save_tokenizer
from lorawgpu.weights.tensors import Checkpoint

TORCH_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def config_json(checkpoint: Checkpoint, config: ModelConfig | None = None) -> dict:
    """The config.json of a base that came as GGUF, or for a changed `config` of it. Raises UserError if there is none
    that describes the model."""
    config = config or checkpoint.config
    down = f"{config.group_modules(0, 'down')[0]}.weight"
    dtype = "bf16" if config.ternary else checkpoint.dense(down).dtype
    return to_hf(config, FAMILIES[config.family], TORCH_DTYPES[dtype])


def write_hf_files(folder: Path, checkpoint: Checkpoint, config: ModelConfig | None = None) -> None:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja.

    Raises UserError for a RoPE scaling that config.json cannot express, and CheckFailed if the tokenizer differs when
    read back.
    """
    config = config or checkpoint.config
    _write(folder / "config.json", config_json(checkpoint, config))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
    ids |= {"pad_token_id": config.pad_token_id}
    _write(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    write_tokenizer(folder, checkpoint.tokenizer(), config.max_position_embeddings)


def _write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_templates(folder: Path, template: str, tool_use: str | None) -> None:
    """The chat template, and the one for conversations with tools if it is another one, where transformers has them."""
    (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    if tool_use is not None:
        (folder / TOOL_USE_FILE).parent.mkdir(exist_ok=True)
        (folder / TOOL_USE_FILE).write_text(tool_use, encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: GuardedTokenizer, longest: int) -> None:
    """The files of a fast tokenizer and its chat templates, where transformers has them. CheckFailed as
    `save_tokenizer`."""
    if tokenizer.chat_template is not None:
        write_templates(folder, tokenizer.chat_template, tokenizer.tool_use_template)
    save_tokenizer(folder, tokenizer, longest)
