"""All families: by name, by config.json's `model_type`, and by GGUF architecture."""

from lorawgpu.families import bitnet, gemma, gemma4, granite, llama, mistral, olmo, phi3, qwen, smollm3
from lorawgpu.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        bitnet.FAMILY,
        qwen.QWEN2,
        qwen.QWEN3,
        gemma.GEMMA2,
        gemma.GEMMA3,
        gemma4.FAMILY,
        mistral.MISTRAL,
        mistral.MINISTRAL3,
        smollm3.FAMILY,
        granite.FAMILY,
        granite.HYBRID,
        phi3.FAMILY,
        olmo.OLMO2,
        olmo.OLMO3,
    )
}
BY_MODEL_TYPE = {model_type: family for family in FAMILIES.values() for model_type in family.architectures}
BY_GGUF_ARCH = {arch: family for family in FAMILIES.values() for arch in family.gguf.readable}
