"""Exchanging adapters with PEFT: it loads what we write, and we load what it writes.

The tests marked `reference` run transformers and PEFT on the golden models; the others need neither.
"""

import json

import numpy as np
import pytest
from exports import PECULIAR, adapter_of, export, gguf_with_tokenizer
from golden_case import GOLDEN, SMALL_CASES
from tiny_model import Tiny, random_samples, tiny_config

from lorawgpu.api.model import LoadedModel
from lorawgpu.data.batching import flatten
from lorawgpu.errors import UserError
from lorawgpu.evaluate.__main__ import main as evaluate
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.reference.model import model_forward
from lorawgpu.weights.loader import open_checkpoint

DENSE = GOLDEN / "llama_dense"
IDS = (np.arange(40) * 37 % 150).tolist()
DENSE_TOLERANCE, TERNARY_TOLERANCE = 1e-4, 5e-2  # float32 in another order; one int8 rounding that flips


def tolerance(case) -> float:
    return DENSE_TOLERANCE if open_checkpoint(GOLDEN / case).config.ternary is None else TERNARY_TOLERANCE


def relative(got, want) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def our_logits(device, kernels, model, adapter=None):
    checkpoint = open_checkpoint(model)
    lora = read_adapter(adapter, checkpoint.config) if adapter else None
    return LoadedModel(device, checkpoint, lora, kernels).logits(IDS)


def assert_agree(ours, theirs, base, tolerance):
    """Within the tolerance of each other, and far from a model without the adapter."""
    assert relative(ours, theirs) < tolerance
    assert relative(base, theirs) > 4 * tolerance


def test_patterns_and_rslora_against_the_reference(device, kernels):
    tiny = Tiny(device, kernels, tiny_config(), PECULIAR)
    batch = flatten(random_samples([9, 20]), 32)
    ours = tiny.engine(32).logits(batch, np.arange(29))
    assert relative(ours, model_forward(tiny.reference(), batch)[0][:29]) < 1e-5  # float32 against float64


REJECTED = {
    "use_dora": ({"use_dora": True}, "use_dora: DoRA adapters are not supported"),
    "modules_to_save": ({"modules_to_save": ["score"]}, "modules_to_save is ['score']: wanted a list"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only'; trained biases are not supported"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
    "trainable_token_indices": ({"trainable_token_indices": ["a"]}, "trainable_token_indices"),
    "layer_replication": ({"layer_replication": [[0, 2]]}, "'layer_replication' is [[0, 2]]"),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'; only LORA"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_settings_are_rejected_by_name(tmp_path, capsys, name):
    keys, words = REJECTED[name]
    adapter = adapter_of(tmp_path / "a", DENSE)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | keys))
    assert export("--adapter", adapter, "--to", "gguf", "--model", DENSE, "--out", tmp_path / "g") == 2
    assert words in capsys.readouterr().err and not (tmp_path / "g").exists()
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n')
    argv = ["--model", DENSE, "--adapter", adapter, "--data", tmp_path / "d.jsonl"]
    assert evaluate(list(map(str, argv))) == 2
    assert words in capsys.readouterr().err


# Against transformers and PEFT


def reference_model(path):
    """transformers' model in float32; tensors that it loads in another dtype are widened."""
    import torch
    import transformers
    from transformers.integrations.bitnet import BitLinear

    kind = transformers.AutoConfig.from_pretrained(path).model_type
    classes = {"mistral3": transformers.AutoModelForImageTextToText}  # has no class for text alone
    model = classes.get(kind, transformers.AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.float()
        if isinstance(module, BitLinear):
            module.dtype = torch.float32
    return model.eval()


def with_adapter(path, adapter):
    """PEFT's model. transformers' BitLinear is not an nn.Linear, so PEFT needs a custom module for it."""
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora.layer import Linear
    from transformers.integrations.bitnet import BitLinear

    config = LoraConfig.from_pretrained(adapter)
    config._register_custom_module({BitLinear: Linear})
    return PeftModel.from_pretrained(reference_model(path), adapter, config=config).eval()


def their_logits(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.reference
@pytest.mark.parametrize("case", SMALL_CASES)
@pytest.mark.parametrize("kind", ["plain", "rslora", "peculiar"])
def test_peft_computes_what_we_do_with_our_export(tmp_path, device, kernels, case, kind):
    targets = ("q_proj",) if case == "bitnet_q_only" else LINEAR_MODULES
    lora = {
        "plain": LoraConfig(4, 8, targets),
        "rslora": LoraConfig(8, 4, targets, use_rslora=True),
        "peculiar": PECULIAR,
    }[kind]
    model = GOLDEN / case
    adapter = adapter_of(tmp_path / "a", model, lora, seed=3)
    assert export("--adapter", adapter, "--to", "peft", "--model", model, "--out", tmp_path / "p") == 0
    theirs = their_logits(with_adapter(model, tmp_path / "p"))
    ours, base = our_logits(device, kernels, model, adapter), our_logits(device, kernels, model)
    assert_agree(ours, theirs, base, tolerance(case))


ENDS = {
    "rows": LoraConfig(4, 8, ("q_proj",), trainable_token_indices={"embed_tokens": tuple(IDS[1:4])}),
    "whole": LoraConfig(4, 8, ("q_proj",), modules_to_save=("embed_tokens", "lm_head")),
    "LoRA": LoraConfig(4, 8, ("q_proj", "embed_tokens", "lm_head")),
}


@pytest.mark.reference
@pytest.mark.parametrize("kind", ENDS)
def test_peft_computes_what_we_do_with_embedding_and_head(tmp_path, device, kernels, kind):
    adapter = adapter_of(tmp_path / "a", DENSE, ENDS[kind], seed=3)
    theirs = their_logits(with_adapter(DENSE, adapter))
    ours, base = our_logits(device, kernels, DENSE, adapter), our_logits(device, kernels, DENSE)
    assert_agree(ours, theirs, base, DENSE_TOLERANCE)


@pytest.mark.reference
def test_peft_refuses_bitlinear_as_we_warn(tmp_path, capsys):
    from peft import PeftModel

    model = GOLDEN / "llama_bitlinear"
    argv = ["--adapter", model / "adapter_init", "--model", model, "--to", "peft", "--out", tmp_path / "p"]
    assert export(*argv) == 0 and "PEFT needs a custom module mapping" in capsys.readouterr().out
    with pytest.raises(ValueError, match="BitLinear.* is not supported"):
        PeftModel.from_pretrained(reference_model(model), tmp_path / "p")


MADE_BY_PEFT = {
    "list": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "regex": {"target_modules": r".*\.layers\.1\.(self_attn\.[qk]_proj|mlp\.up_proj)"},
    "all-linear": {"target_modules": "all-linear"},
    "one module by its path": {"target_modules": ["model.layers.0.mlp.gate_proj", "layers.1.self_attn.o_proj"]},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 3},
    "rank_pattern": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7, r"layers\.\d+\.mlp\.down_proj": 3},
    },
    "alpha_pattern": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 8},
        "alpha_pattern": {"k_proj": 2, "^model.layers.0.self_attn.q_proj": 32, "up_proj": 0.5},
    },
    "rows of tokens": {"target_modules": ["v_proj"], "trainable_token_indices": IDS[1:4]},
    "embedding and head": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "LoRA on embedding and head": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "rslora and patterns": {
        "target_modules": ["v_proj", "o_proj"],
        "use_rslora": True,
        "rank_pattern": {"v_proj": 9},
        "alpha_pattern": {"o_proj": 5},
    },
}


@pytest.mark.reference
@pytest.mark.parametrize("kind", MADE_BY_PEFT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_peft_makes(tmp_path, device, kernels, kind, dtype):
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | MADE_BY_PEFT[kind])
    model = peft.get_peft_model(reference_model(DENSE), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn_like(parameter) * 0.1).to(getattr(torch, dtype)).float()
    theirs = their_logits(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))  # as it is saved
    model.save_pretrained(tmp_path)
    ours, base = our_logits(device, kernels, DENSE, tmp_path), our_logits(device, kernels, DENSE)
    assert_agree(ours, theirs, base, DENSE_TOLERANCE)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"use_dora": True}, "use_dora: DoRA adapters are not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"lora_bias": True}, "lora_bias"),
    ],
)
def test_what_peft_makes_and_we_refuse(tmp_path, keys, words):
    import peft

    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | keys)
    peft.get_peft_model(reference_model(DENSE), config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path, open_checkpoint(DENSE).config)


@pytest.mark.reference
def test_transformers_loads_what_we_merge(tmp_path, device, kernels):
    """From a folder in bf16, where rounding moves the logits, and from a GGUF in float32, where it does not."""
    adapter = adapter_of(tmp_path / "a", DENSE)
    model = gguf_with_tokenizer(tmp_path / "m.gguf")
    for base, out, bound in ((DENSE, "folder", 3e-2), (model, "gguf", DENSE_TOLERANCE)):
        assert export("--adapter", adapter, "--to", "merged", "--model", base, "--out", tmp_path / out) == 0
        theirs = their_logits(reference_model(tmp_path / out))
        assert_agree(our_logits(device, kernels, base, adapter), theirs, our_logits(device, kernels, base), bound)
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "gguf"), open_checkpoint(model).tokenizer()
    for text in ("abcab naïve", "<s>ab</s>"):
        assert theirs(text).input_ids == ours.encode(text, add_special=True)
    messages = [{"role": "user", "content": "ab"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).startswith("<|im_start|>")


@pytest.mark.reference
@pytest.mark.parametrize("case", ["bitnet_packed", "llama_bitlinear"])
def test_transformers_loads_a_dequantized_model(tmp_path, case):
    """Without int8 activations the logits are close to ours, not equal: hence "for evaluation only"."""
    model = GOLDEN / case
    argv = ["--adapter", model / "adapter_init", "--model", model, "--to", "merged", "--dequantize"]
    assert export(*argv, "--out", tmp_path / "m") == 0
    theirs = their_logits(reference_model(tmp_path / "m"))
    right, base = their_logits(with_adapter(model, model / "adapter_init")), their_logits(reference_model(model))
    assert relative(theirs, right) < 0.1 < relative(base, right)


@pytest.mark.reference
def test_an_import_continues_through_every_export(tmp_path, device, kernels):
    """PEFT's folder in, ours out, PEFT again: the same logits at each end."""
    import peft
    import torch

    torch.manual_seed(1)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | MADE_BY_PEFT["rslora and patterns"]
    )
    model = peft.get_peft_model(reference_model(DENSE), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    model.save_pretrained(tmp_path / "a")
    assert export("--adapter", tmp_path / "a", "--to", "peft", "--model", DENSE, "--out", tmp_path / "p") == 0
    assert relative(their_logits(with_adapter(DENSE, tmp_path / "p")), their_logits(model)) < 1e-6
