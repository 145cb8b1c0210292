"""All families: by name, by config.json's `model_type`, and by GGUF architecture."""

from lorawgpu.families import bitnet, llama
from lorawgpu.families.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, bitnet.FAMILY)}
BY_MODEL_TYPE = {model_type: family for family in FAMILIES.values() for model_type in family.architectures}
BY_GGUF_ARCH = {arch: family for family in FAMILIES.values() for arch in family.gguf.archs if family.gguf.readable}
