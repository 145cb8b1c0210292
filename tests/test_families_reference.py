"""Random small models of every family, built and saved by transformers, against PyTorch's float64 gradients.

They exercise how configs are read: sizes that divide nothing, layers in irregular order, keys that are left out, and
both spellings of a config, as published and as transformers 5 saves it.
"""

import json
import random

import numpy as np
import pytest
from golden_case import reference_model
from gradcheck import relative_error

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.errors import UserError
from lorawgpu.families.hf import from_hf
from lorawgpu.reference.model import model_forward, step_gradients
from lorawgpu.weights.hf_folder import HfFolder

pytestmark = pytest.mark.reference

LENGTHS, VOCAB, SEEDS = (13, 8), 61, 8
# transformers rounds angles and the norms' constants here and there to float32, even in a float64 model.
TOLERANCE = 2e-6
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def sizes(draw, free_head_dim=True):
    """Sizes that all families share. free_head_dim: whether the head size may differ from hidden / heads."""
    heads, kv_heads = draw.choice([(6, 3), (5, 1), (4, 4)])
    head_dim = draw.choice([10, 14, 16, 24, 32])
    hidden = draw.choice([36, 52]) if free_head_dim else heads * head_dim
    return {
        "hidden_size": hidden,
        "intermediate_size": draw.choice([45, 52]),
        "num_hidden_layers": draw.choice([2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 0.004]),
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": draw.random() < 0.5,
    } | ({"head_dim": head_dim} if free_head_dim else {})


def scaling(draw, *kinds, older=True):
    """A rope_scaling of one of `kinds`, or None. older: whether it may have the older spelling of rope_type."""
    spelling, original = draw.choice(["rope_type", "type"] if older else ["rope_type"]), draw.choice([8, 16])
    kind = draw.choice([None, *kinds])
    if kind is None:
        return None
    data = {spelling: kind, "factor": draw.choice([2.0, 8.0])}
    if kind != "linear":
        data["original_max_position_embeddings"] = original
    if kind == "llama3":
        data |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        more = [{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}, {"truncate": False},
                {"mscale": 0.7, "mscale_all_dim": 1.2}]  # fmt: skip
        data |= draw.choice(more)
    return data


def window(draw):
    return draw.choice([1, 3, 5, 40])


def kinds(draw, count):
    """Layer types in irregular order, or None for the family's own."""
    return draw.choice([None, [draw.choice([LOCAL, GLOBAL]) for _ in range(count)]])


def given(**keys):
    return {key: value for key, value in keys.items() if value is not None}


def llama(draw):
    return "LlamaForCausalLM", even_heads(draw) | given(rope_scaling=scaling(draw, "llama3", "yarn", "linear"))


def qwen2(draw):
    data = sizes(draw, free_head_dim=False)
    data |= {"use_sliding_window": draw.random() < 0.5, "sliding_window": window(draw)}
    data["max_window_layers"] = draw.choice([0, 1, 2, 9])
    if data["use_sliding_window"]:
        data |= given(layer_types=kinds(draw, data["num_hidden_layers"]))
    return "Qwen2ForCausalLM", data | given(rope_scaling=scaling(draw, "yarn"), rope_theta=draw.choice([1e4, 1e6]))


def qwen3(draw):
    _, data = qwen2(draw)  # whose keys are the same
    return "Qwen3ForCausalLM", data | {"head_dim": draw.choice([10, 16, 32])}


def even_heads(draw):
    """transformers wants the width of some families to be a multiple of their heads."""
    data = sizes(draw)
    data["hidden_size"] = 12 * data["num_attention_heads"]
    return data


def gemma2(draw):
    data = even_heads(draw) | {"sliding_window": window(draw), "query_pre_attn_scalar": draw.choice([9, 20])}
    data |= {"attn_logit_softcapping": draw.choice([None, 4.0]), "final_logit_softcapping": draw.choice([None, 5.0])}
    return "Gemma2ForCausalLM", data | given(layer_types=kinds(draw, data["num_hidden_layers"]))


def gemma3(draw):
    data = even_heads(draw) | {"sliding_window": window(draw), "query_pre_attn_scalar": draw.choice([9, 20])}
    data |= {"final_logit_softcapping": draw.choice([None, 5.0])}
    data |= draw.choice([{}, {"sliding_window_pattern": 2}, {"rope_local_base_freq": 500.0, "rope_theta": 70000.0}])
    data |= given(layer_types=kinds(draw, data["num_hidden_layers"]), rope_scaling=scaling(draw, "linear", older=False))
    return "Gemma3ForCausalLM", data


def gemma4(draw):
    data = sizes(draw) | {"sliding_window": window(draw), "global_head_dim": draw.choice([16, 20, 28])}
    count = draw.choice([4, 6, 7])
    shared = draw.choice([0, 1, 2, 3])
    types = [draw.choice([LOCAL, GLOBAL]) for _ in range(count)]
    types[:2] = draw.sample([LOCAL, GLOBAL], 2) if count - shared >= 2 else types[:2]
    types[-1] = GLOBAL
    data |= {"num_hidden_layers": count, "num_kv_shared_layers": shared, "layer_types": types}
    if count - shared < 2 or set(types[: count - shared]) != set(types):
        data["num_kv_shared_layers"] = 0
    # transformers cannot run shared layers without per-layer inputs
    data["hidden_size_per_layer_input"] = draw.choice([6, 9] if data["num_kv_shared_layers"] else [0, 6, 9])
    data["vocab_size_per_layer_input"] = VOCAB
    data["use_double_wide_mlp"] = draw.random() < 0.5
    data["attention_k_eq_v"] = draw.random() < 0.5
    data["num_global_key_value_heads"] = draw.choice([None, 1])
    data["final_logit_softcapping"] = draw.choice([None, 5.0])
    if draw.random() < 0.5:
        data["rope_parameters"] = {
            LOCAL: {"rope_type": "default", "rope_theta": 300.0},
            GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
                     "rope_theta": 9000.0},
        }  # fmt: skip
    return "Gemma4ForCausalLM", data


def mistral(draw):
    data = sizes(draw) | draw.choice([{}, {"sliding_window": None}, {"sliding_window": window(draw)}])
    return "MistralForCausalLM", data | given(rope_scaling=scaling(draw, "yarn"))


def ministral3(draw):
    data = sizes(draw) | draw.choice([{}, {"sliding_window": window(draw)}])
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 5}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": draw.choice([0.4, 1.0])}
    return "Ministral3ForCausalLM", data | {"rope_parameters": rope | {"llama_4_scaling_beta": draw.choice([0.1, 0.4])}}


def smollm3(draw):
    data = sizes(draw, free_head_dim=False)
    count = data["num_hidden_layers"]
    data |= draw.choice(
        [{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [draw.choice([0, 1]) for _ in range(count)]}]
    )
    if draw.random() < 0.5:
        data |= {"use_sliding_window": True, "sliding_window": window(draw)}
        data |= given(layer_types=kinds(draw, count))
    return "SmolLM3ForCausalLM", data | given(rope_scaling=scaling(draw, "yarn"))


def multipliers(draw):
    return {
        "attention_multiplier": draw.choice([0.1, 0.3]),
        "embedding_multiplier": draw.choice([1, 3.0]),
        "residual_multiplier": draw.choice([0.3, 1.0]),
        "logits_scaling": draw.choice([1.0, 4]),
    }


def granite(draw):
    return "GraniteForCausalLM", sizes(draw, free_head_dim=False) | multipliers(draw)


def granite4(draw):
    data = sizes(draw, free_head_dim=False) | multipliers(draw)
    data |= {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": draw.choice([45, 52])}
    data |= {"layer_types": ["attention"] * data["num_hidden_layers"], "mamba_n_heads": 2, "intermediate_size": 7}
    return "GraniteMoeHybridForCausalLM", data | {"position_embedding_type": draw.choice(["rope", "nope", None])}


def phi3(draw):
    data = sizes(draw, free_head_dim=False) | {"sliding_window": draw.choice([None, 1, 3, 40])}
    head_dim = data["hidden_size"] // data["num_attention_heads"]
    partial = draw.choice([p for p in (0.25, 0.5, 0.75, 1.0) if int(head_dim * p) % 2 == 0])
    data |= {"partial_rotary_factor": partial} if partial != 1 else {}
    if draw.random() < 0.7:
        pairs = int(head_dim * partial) // 2
        factors = {f"{n}_factor": [round(draw.uniform(1, 6), 3) for _ in range(pairs)] for n in ("short", "long")}
        data["rope_scaling"] = factors | {draw.choice(["type", "rope_type"]): "longrope"}
        data["original_max_position_embeddings"] = draw.choice([4, 10, 32])
    return "Phi3ForCausalLM", data


def olmo2(draw):
    return "Olmo2ForCausalLM", sizes(draw, free_head_dim=False) | given(rope_scaling=scaling(draw, "yarn", "linear"))


def olmo3(draw):
    data = sizes(draw, free_head_dim=False) | {"sliding_window": window(draw)}
    data |= given(layer_types=kinds(draw, data["num_hidden_layers"]), rope_scaling=scaling(draw, "yarn", older=False))
    return "Olmo3ForCausalLM", data | draw.choice([{}, {"rope_theta": 20000.0}])


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 2}


def multimodal(draw, name, text, vision):
    """The text model of a family in a multimodal one, whose own config says whether the head is tied, if any does."""
    _, data = text(draw)
    data = {key: value for key, value in data.items() if key != "tie_word_embeddings"}
    data |= {"model_type": text.__name__ if text is not gemma3 and text is not gemma4 else f"{text.__name__}_text"}
    tied = draw.choice([{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
    return name, {"text_config": data, "vision_config": VISION | vision, "image_token_index": 3} | tied


def gemma3_multimodal(draw):
    vision = {"image_size": 8, "model_type": "siglip_vision_model", "vision_use_head": False}
    return multimodal(draw, "Gemma3ForConditionalGeneration", gemma3, vision)


def gemma4_multimodal(draw):
    vision = {"num_key_value_heads": 1, "head_dim": 8, "pooling_kernel_size": 1, "position_embedding_size": 4}
    name, data = multimodal(draw, "Gemma4ForConditionalGeneration", gemma4, vision | {"model_type": "gemma4_vision"})
    return name, data | {"audio_config": None, "image_token_id": 0, "video_token_id": 1, "audio_token_id": 2}


def mistral3(draw):
    vision = {"image_size": 8, "head_dim": 8, "model_type": "pixtral"}
    text = draw.choice([mistral, ministral3])
    return multimodal(draw, "Mistral3ForConditionalGeneration", text, vision)


FAMILIES = (llama, qwen2, qwen3, gemma2, gemma3, gemma4, mistral, ministral3, smollm3, granite, granite4, phi3, olmo2,
            olmo3, gemma3_multimodal, gemma4_multimodal, mistral3)  # fmt: skip


@pytest.fixture(scope="module")
def make(request):
    """scripts/make_golden.py, which builds models and computes in float64."""
    import sys

    sys.path.insert(0, str(request.config.rootpath / "scripts"))
    yield pytest.importorskip("make_golden")
    sys.path.pop(0)


def save_model(make, folder, name, data, seed, published):
    """Write a model of transformers' class `name`. published: with config.json as `data` spells it."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    config = data | {"architectures": [name], "model_type": cls.config_class.model_type}
    folder.mkdir()
    if published:
        make.write_model(folder, config, seed)
        return
    with torch.no_grad():
        model = cls._from_config(cls.config_class(**data), dtype=torch.float32)
        make.random_weights(model, seed)
    model.bfloat16().save_pretrained(folder)


def batch_of(seed):
    rng, width = np.random.default_rng(seed), max(LENGTHS)
    mask = np.arange(width) < np.array(LENGTHS)[:, None]
    ids = rng.integers(3, VOCAB, mask.shape)
    return {"input_ids": ids, "labels": np.where(mask, ids, -100), "attention_mask": mask.astype(int)}


def torch_result(make, folder, batch, targets, seed):
    """Loss, logits, the adapter and its gradients, from PyTorch in float64."""
    import peft
    import torch

    with make.float64():
        lora = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets)
        model = peft.get_peft_model(make.load_model(folder, torch.float64), lora, autocast_adapter_dtype=False)
        parameters = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
        rng = np.random.default_rng(seed)
        for parameter in parameters.values():
            values = rng.standard_normal(parameter.shape) * 0.5 / parameter.shape[1] ** 0.5
            parameter.data = torch.tensor(values.astype(np.float32)).to(torch.float64)
        loss, logits = make.losses_of(model, batch)
        loss.backward()
        adapter = {name: p.detach().numpy() for name, p in parameters.items()}
        grads = {name: p.grad.numpy() for name, p in parameters.items()}
    return loss.item(), np.concatenate([row.detach().numpy() for row in logits]), adapter, grads


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_random_model_of_the_family(make, tmp_path, family, seed):
    name, data = family(random.Random(f"{family.__name__} {seed}"))
    folder = tmp_path / "model"
    save_model(make, folder, name, data, seed, published=seed % 2 == 0)
    batch, checkpoint = batch_of(seed), HfFolder(folder, "model")
    targets = list(checkpoint.config.all_linear())
    if "text_config" in data:  # the vision tower has layers of the same names
        targets = rf".*language_model.*\.({'|'.join(targets)})"
    loss, logits, adapter, grads = torch_result(make, folder, batch, targets, seed)
    samples = [
        Sample(ids[:n].astype(np.int32), labels[:n].astype(np.int32))
        for ids, labels, n in zip(batch["input_ids"], batch["labels"], LENGTHS, strict=True)
    ]
    model, flat = reference_model(checkpoint, adapter, 1.5), flatten(samples, sum(LENGTHS))
    context = json.loads((folder / "config.json").read_text())
    assert relative_error(model_forward(model, flat)[0], logits) < TOLERANCE, context
    our_loss, ours = step_gradients(model, [flat])
    assert our_loss == pytest.approx(loss, abs=TOLERANCE)
    errors = {key: relative_error(ours[key], grads[key]) for key in grads}
    assert ours.keys() == grads.keys() and max(errors.values()) < TOLERANCE, (errors, context)


# Config classes by the class of the model: what a config.json needs besides the class's defaults.
CLASSES = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma3ForConditionalGeneration": {},
    "Gemma4ForCausalLM": {},
    "Gemma4ForConditionalGeneration": {},
    "MistralForCausalLM": {},
    "Ministral3ForCausalLM": {},
    "Mistral3ForConditionalGeneration": {"text_config": {"model_type": "ministral3"}},
    "SmolLM3ForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["attention"] * 32},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {},
}


TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # those of a model's class are of no model in particular


@pytest.mark.parametrize("name", CLASSES)
def test_a_key_that_is_left_out_has_transformers_default(name):
    import transformers

    cls = getattr(transformers, name).config_class
    full = json.loads(cls(**CLASSES[name]).to_json_string(use_diff=False)) | {"architectures": [name]}
    wanted = from_hf(full)
    inner = "text_config" if "text_config" in full else None
    for key in (full[inner] if inner else full).keys() - TOKENS:
        if inner:
            less = full | {inner: {k: v for k, v in full[inner].items() if k != key}}
        else:
            less = {k: v for k, v in full.items() if k != key}
        try:
            assert from_hf(less) == wanted, key
        except UserError as error:
            assert f"{key} is missing" in str(error) or key in ("model_type", *CLASSES[name]), error
