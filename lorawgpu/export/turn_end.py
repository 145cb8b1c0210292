"""The token that ends a turn: a server has to stop there, also if the base model ends its texts with another one."""

import json
from pathlib import Path

from lorawgpu.chat.template import TemplateFailed
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export.source import ExportSource
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.generate.prompts import Prompts
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import MAX_TOKENIZER
from lorawgpu.weights.hf_folder import read_config

TURNS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def unnamed_turn_end(source: ExportSource) -> int | None:
    """The token that ends a turn in the chat template of the run, if the base model's config does not name it.

    None also without a tokenizer or a template, and if the template ends turns with plain text.
    """
    try:
        end = source.prompts.turn_end()
    except UserError:
        return None
    return None if end in source.config.eos_token_ids else end


def remark(source: ExportSource, advice: str) -> list[str]:
    """That the base model does not stop where a turn ends, with what to do about it in this runtime."""
    end = source.checkpoint and unnamed_turn_end(source)
    if end is None:
        return []
    token = source.prompts.tokenizer.token(end)
    return [f"a turn ends with {token} (id {end}), where the base model's config does not stop: {advice}"]


def name_turn_end(folder: Path, source: ExportSource) -> None:
    """Name the end of a turn in the config and the tokenizer of a model folder, before what they name already.

    The tokenizer's `eos_token` stays if the chat template shows it. CheckFailed if the folder, read back, does not
    stop there.
    """
    end = unnamed_turn_end(source)
    if end is None:
        return
    prompts = source.prompts
    ends = [end, *source.config.eos_token_ids]
    generation = folder / "generation_config.json"
    _change(folder / "config.json", eos_token_id=ends)
    _change(generation, **(_own_ids(source) if not generation.is_file() else {}), eos_token_id=ends)
    token = prompts.tokenizer.token(end)
    if _same_text(prompts, token):
        _change(folder / "tokenizer_config.json", eos_token=token)
        if (folder / "special_tokens_map.json").is_file():
            _change(folder / "special_tokens_map.json", eos_token=token)
        _list_as_added(folder / "tokenizer.json", end, token)
    if end not in read_config(folder).eos_token_ids or GuardedTokenizer.from_hf_folder(folder).token_id(token) != end:
        raise CheckFailed(f"{folder}, read back: it does not stop at {token}, which ends a turn")


def _own_ids(source: ExportSource) -> dict[str, int]:
    ids = {"bos_token_id": source.config.bos_token_id, "pad_token_id": source.config.pad_token_id}
    return {key: value for key, value in ids.items() if value is not None}


def _same_text(prompts: Prompts, eos: str) -> bool:
    """Whether the chat template renders the same with another `eos_token`."""
    template = prompts.template
    other = type(template)(template.source, template.special_tokens | {"eos_token": eos}, template.now)
    try:
        return all(
            template.render(TURNS, add_generation_prompt=prompt) == other.render(TURNS, add_generation_prompt=prompt)
            for prompt in (False, True)
        )
    except TemplateFailed:
        return False


def _list_as_added(path: Path, token_id: int, token: str) -> None:
    """Converters look up special tokens in the list of added ones."""
    added = read_json_object(path, MAX_TOKENIZER).get("added_tokens") or []
    if all(entry["content"] != token for entry in added):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        entry = {"id": token_id, "content": token, **flags, "special": True}
        _change(path, added_tokens=sorted([*added, entry], key=lambda entry: entry["id"]))


def _change(path: Path, **keys) -> None:
    data = read_json_object(path, MAX_TOKENIZER) if path.is_file() else {}
    path.write_text(json.dumps(data | keys, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
