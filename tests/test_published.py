"""The configs of published models have the shapes of the models that they name."""

import math

import pytest

from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import SHAPES
from lorawgpu.weights.tensors import expected_tensors

MILLIONS = {  # parameters by transformers' count, without Gemma 4's layer scalars
    "bitnet-2b": 2412.8, "falcon3-1b-1.58bit": 1669.4, "smollm2-135m": 134.5, "llama-3.2-1b": 1235.8,
    "smollm2-360m": 361.8, "smollm2-1.7b": 1711.4, "tinyllama-1.1b": 1100.0,
    "llama-3.2-3b": 3212.7, "llama-3.1-8b": 8030.3, "qwen2.5-1.5b": 1543.7, "qwen3-0.6b": 596.0, "qwen3-4b": 4022.5,
    "gemma-3-1b": 999.9, "gemma-4-e2b": 4628.6, "smollm3-3b": 3075.1, "phi-4-mini": 3836.0, "tiny": 0.1,
}  # fmt: skip


def test_each_has_the_parameters_of_its_model():
    counted = {name: sum(map(math.prod, expected_tensors(config).values())) for name, config in SHAPES.items()}
    assert {name: round(count / 1e6, 1) for name, count in counted.items()} == MILLIONS


@pytest.mark.reference
@pytest.mark.parametrize("name", CONFIGS)
def test_each_has_the_tensors_of_transformers(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    data = CONFIGS[name].get("text_config", CONFIGS[name])
    settings = {key: value for key, value in data.items() if key not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(data["model_type"], **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
    prefix = SHAPES[name].prefix
    ours = {key.replace(prefix, "model."): shape for key, shape in expected_tensors(SHAPES[name]).items()}
    assert {key: shape for key, shape in ours.items() if not key.endswith("layer_scalar")} == theirs
