"""The keys of axolotl's data sets, in ours. Part of `translate.py`."""

from typing import Any

from lorawgpu.config.axolotl import DATA_MISSING, DATA_WITHOUT_EFFECT
from lorawgpu.config.source import ConfigProblem

# Types that are another one with other keys.
TYPES = {
    "alpaca_chat.load_qa": ("alpaca", {"field_instruction": "question", "field_output": "answer"}),
    "alpaca_chat.load_camel_ai": ("alpaca", {"field_instruction": "message_1", "field_output": "message_2"}),
    "alpaca_w_system.load_open_orca": (
        "alpaca", {"field_system": "system_prompt", "field_instruction": "question", "field_output": "response"}
    ),
    "gpteacher": ("alpaca", {"field_output": "response"}),
    "oasst": ("alpaca", {"field_instruction": "INSTRUCTION", "field_output": "RESPONSE"}),
}  # fmt: skip


def translate_data_sets(t: Any, key: str) -> list[str]:
    """Turn the entries under `key` into ours, in place; returns axolotl's own keys and types that they use."""
    sets, foreign = t.data.get(key), []
    if not isinstance(sets, list):
        return foreign
    for index, item in enumerate(sets):
        if isinstance(item, dict):
            foreign += _translate(t, item, (key, index))
    return foreign


def _translate(t: Any, item: dict, where: tuple) -> list[str]:
    for name in [name for name, value in item.items() if value is None and isinstance(name, str)]:
        del item[name]
    foreign = [name for name in item if name in DATA_MISSING or name in DATA_WITHOUT_EFFECT or name in _OLDER]
    kind = item.get("type")
    if isinstance(kind, dict):  # axolotl's own way to name the keys of an instruction
        own = {name: value for name, value in kind.items() if value is not None}
        del item["type"]
        for name, value in own.items():
            item.setdefault(name, value)
        foreign.append("type")
    elif isinstance(kind, str) and kind in TYPES:
        item["type"], names = TYPES[kind]
        for name, value in names.items():
            item.setdefault(name, value)
        foreign.append(kind)
    for name in [name for name in item if name in DATA_MISSING]:
        value = item.pop(name)
        if value and not (name == "chat_template" and value in ("tokenizer_default", t.data.get("chat_template"))):
            t.problems.append(ConfigProblem((*where, name), f"{name}: missing here: {DATA_MISSING[name]}"))
    if item.get("path") in LOADERS and item.get("data_files"):
        foreign.append("path")
        _take_files(t, item, where)
    for name in [name for name in item if name in DATA_WITHOUT_EFFECT]:
        if item.pop(name):
            t.notes.append(f"without effect here: {name} (of {where[0]})")
    for name, ours in _OLDER.items():
        if name in item:
            value = item.pop(name)
            if ours == "train_on_eos":
                item.setdefault(ours, value)
            elif isinstance(mapped := item.setdefault("message_property_mappings", {}), dict):
                mapped.setdefault(ours, value)
    return foreign


def _take_files(t: Any, item: dict, where: tuple) -> None:
    """Of `path: json`, which names a loader of the library `datasets`, the path is in data_files."""
    files = item.pop("data_files")
    files = [files] if isinstance(files, str) else files
    if isinstance(files, list) and len(files) == 1:
        item["path"] = files[0]
    else:
        what = f"data_files: with path {item['path']}, write each file as an entry of its own, `- path: FILE`"
        t.problems.append(ConfigProblem((*where, "data_files"), what))


LOADERS = ("json", "csv", "parquet")  # of the library `datasets`, by the names it has for them
_OLDER = {"message_field_role": "role", "message_field_content": "content", "train_on_eot": "train_on_eos"}
