"""PEFT and transformers with every family: they load what we write, and we load what they write."""

import json

import numpy as np
import pytest
from exports import export
from family_gguf import write_case
from golden_case import FAMILY_CASES, GOLDEN
from test_export_families import ARCH, TO_FOLDER, adapter_of
from test_import import DENSE_TOLERANCE, assert_agree, reference_model, relative
from tiny_model import random_adapter

from lorawgpu.api.model import LoadedModel
from lorawgpu.errors import UserError
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.weights.loader import open_checkpoint

pytestmark = pytest.mark.reference
STRENGTH = 0.3  # random adapters at full strength drown the base model


def ids_of(model):
    """40 tokens: longer than every window, and than Phi-3's original context. The last ids may stand for images."""
    return (np.arange(40) * 37 % (open_checkpoint(model).config.vocab_size - 20) + 3).tolist()


def our_logits(device, kernels, model, adapter=None, ids=None):
    checkpoint = open_checkpoint(model)
    lora = read_adapter(adapter, checkpoint.config) if adapter else None
    return LoadedModel(device, checkpoint, lora, kernels).logits(ids or ids_of(model))


def their_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def with_adapter(path, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(reference_model(path), adapter).eval()


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_peft_computes_what_we_do_with_our_export(tmp_path, device, kernels, case):
    model = GOLDEN / case
    adapter = adapter_of(tmp_path / "a", model, strength=STRENGTH)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    theirs = their_logits(with_adapter(model, tmp_path / "p"), ids_of(model))
    ours, base = our_logits(device, kernels, model, adapter), our_logits(device, kernels, model)
    assert_agree(ours, theirs, base, DENSE_TOLERANCE)


TEXT = r".*language_model\..*"
MADE_BY_PEFT = {
    "gemma4": {
        "pattern": {"target_modules": rf"{TEXT}\.(q_proj|v_proj)"},
        "pattern of layers": {"target_modules": r"model\.language_model\.layers\.[25]\.(self_attn|mlp)\.[a-z]+_proj"},
        "per-layer inputs": {"target_modules": rf"{TEXT}\.(per_layer_input_gate|per_layer_projection|up_proj)"},
        "rank_pattern": {
            "target_modules": rf"{TEXT}\.(q_proj|k_proj|down_proj)",
            "rank_pattern": {"model.language_model.layers.0.self_attn.q_proj": 2, r"layers\.\d+\.mlp\.down_proj": 3},
            "alpha_pattern": {"^model.language_model.layers.2.mlp.down_proj": 1, "k_proj": 32},
        },
    },
    "gemma3": {
        "all-linear": {"target_modules": "all-linear"},
        "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    },
    "phi3": {
        "all-linear": {"target_modules": "all-linear", "rank_pattern": {"layers.1.self_attn.qkv_proj": 7}},
        # the names of other models: PEFT finds two of them here
        "names that are not there": {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]},
    },
    "qwen2": {"all-linear": {"target_modules": "all-linear", "alpha_pattern": {"model.layers.0.mlp.up_proj": 1}}},
    "granite4": {
        "all-linear": {"target_modules": "all-linear"},
        "fused": {"target_modules": ["input_linear", "output_linear"], "rank_pattern": {"shared_mlp.input_linear": 6}},
    },
    "olmo3": {"layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1, 3]}},
}


@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, kinds in MADE_BY_PEFT.items() for kind in kinds])
def test_adapters_that_peft_makes(tmp_path, device, kernels, case, kind):
    import peft
    import torch

    torch.manual_seed(0)
    model = GOLDEN / case
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | MADE_BY_PEFT[case][kind])
    made = peft.get_peft_model(reference_model(model), config).eval()
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    made.save_pretrained(tmp_path / "a")
    theirs = their_logits(made, ids_of(model))
    ours, base = our_logits(device, kernels, model, tmp_path / "a"), our_logits(device, kernels, model)
    assert_agree(ours, theirs, base, DENSE_TOLERANCE)
    # what continues from it is written in our own words, and PEFT reads it again
    lora, tensors = read_adapter(tmp_path / "a", open_checkpoint(model).config)
    write_adapter(tmp_path / "b", lora, tensors, "base")
    assert relative(their_logits(with_adapter(model, tmp_path / "b"), ids_of(model)), theirs) < 1e-6


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (r"model\.language_model\.per_layer_model_projection", "per_layer_model_projection"),
        (r"model\.embed_vision\.embedding_projection", "embed_vision.embedding_projection"),
        (r"model\.language_model\.embed_tokens", "embed_tokens.* is not a LoRA tensor of a linear layer"),
    ],
)
def test_what_peft_makes_of_gemma_4_and_we_refuse(tmp_path, target, words):
    import peft

    config = peft.LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM")
    peft.get_peft_model(reference_model(GOLDEN / "gemma4"), config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path, open_checkpoint(GOLDEN / "gemma4").config)


@pytest.mark.parametrize(
    "targets",
    [
        r".*\.(q_proj|v_proj)",
        r"model\.language_model\.layers\.\d\.mlp\.up_proj|.*o_proj",
        ("q_proj", *PER_LAYER_MODULES),
    ],
)
def test_our_targets_select_nothing_in_the_towers_of_gemma_4(tmp_path, targets):
    """PEFT fails on the vision tower's layers; our targets match only below the text model."""
    model, names = GOLDEN / "gemma4", set()
    lora = LoraConfig(4, 8, targets)
    write_adapter(tmp_path, lora, random_adapter(lora, open_checkpoint(model).config), "base")
    for name, _ in with_adapter(model, tmp_path).named_modules():
        if name.endswith(".lora_A.default"):
            names.add(name.removeprefix("base_model.model.").removesuffix(".lora_A.default"))
    assert names == {module for module in open_checkpoint(model).config.linear_shapes() if lora.targets(module)}


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_transformers_loads_what_we_merge(tmp_path, device, kernels, case):
    model = GOLDEN / case
    adapter = adapter_of(tmp_path / "a", model, strength=STRENGTH)
    assert export("--adapter", adapter, "--to", "merged", "--model", model, "--out", tmp_path / "m") == 0
    theirs = their_logits(reference_model(tmp_path / "m"), ids_of(model))
    assert relative(our_logits(device, kernels, tmp_path / "m"), theirs) < DENSE_TOLERANCE
    assert relative(our_logits(device, kernels, model), theirs) > 0.02


@pytest.mark.parametrize("case", TO_FOLDER)
def test_transformers_loads_a_merged_gguf_base(tmp_path, device, kernels, case):
    model = write_case(GOLDEN / case, tmp_path / "m.gguf", ARCH[case], tokenizer=True)
    adapter = adapter_of(tmp_path / "a", model, strength=STRENGTH)
    assert export("--adapter", adapter, "--to", "merged", "--model", model, "--out", tmp_path / "m") == 0
    theirs = reference_model(tmp_path / "m")
    assert type(theirs).__name__ in json.loads((tmp_path / "m" / "config.json").read_text())["architectures"]
    theirs = their_logits(theirs, ids_of(model))
    ours, base = our_logits(device, kernels, model, adapter), our_logits(device, kernels, model)
    assert_agree(ours, theirs, base, DENSE_TOLERANCE)
