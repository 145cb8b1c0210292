"""axolotl's names of chat templates, in ours. Part of `translate.py`."""

from typing import Any

from lorawgpu.chat.builtin import BUILT_IN, FALLBACK

# axolotl's names of templates: those that are ours by another name, and those of a model, with what stands in for it.
EQUAL = {"llama3": "llama-3", "gemma2": "gemma"}
OWN = {
    "gemma3": "gemma", "gemma3n": "gemma", "gemma4": "gemma", "llama3_2_vision": "llama-3", "llama4": None,
    "qwen_25": "chatml", "qwen3": "chatml", "qwen3_5": "chatml", "qwen2_vl": "chatml", "mistral_v1": "mistral",
    "mistral_v2v3": "mistral", "mistral_v3_tekken": "mistral", "mistral_v7_tekken": "mistral", "phi_3": None,
    "phi_35": None, "phi_4": None, "falcon_h1": "chatml", "cohere": None, "command_a": None, "deepseek_v2": None,
    "deepseek_v3": None, "exaone": None, "exaone4": None, "jamba": None, "granite": None, "granitemoe": None,
    "smollm3": "chatml", "olmo2": None, "olmo3": None,
}  # fmt: skip


def translate_template(t: Any, value: Any) -> None:
    """Templates that are named after a model are that model's own; what a model without one gets is beside the name."""
    if not isinstance(value, str) or value in BUILT_IN:
        return
    name = value.removeprefix(FALLBACK)
    template = EQUAL.get(name) or (name if name in BUILT_IN else None)
    if value in ("tokenizer_default", "jinja"):
        t.data["chat_template"] = None
    elif value.startswith(FALLBACK) and template:
        t.data["chat_template"] = FALLBACK + template
    elif value in EQUAL:
        t.data["chat_template"] = template
    elif value in OWN:
        fallback = OWN[value]
        t.notes.append(
            f"chat_template {value}: the model's own" + (f", or {fallback} if it has none" if fallback else "")
        )
        t.data["chat_template"] = FALLBACK + fallback if fallback else None


def alpaca_template(t: Any) -> None:
    """axolotl renders `type: alpaca` with Stanford's prompt; here it is a chat, if the model has a template for it."""
    sets = t.data.get("datasets")
    kinds = [s.get("type") for s in sets if isinstance(s, dict)] if isinstance(sets, list) else []
    if "alpaca" in kinds and not t.data.get("chat_template") and not t.data.get("chat_template_jinja"):
        t.data["chat_template"] = f"{FALLBACK}alpaca"
        t.notes.append(
            "type alpaca: rendered by the model's own chat template, or if it has none, by Stanford's prompt "
            "(axolotl: always, as `chat_template: alpaca`)"
        )
