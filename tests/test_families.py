"""Golden cases of the model families: from Hugging Face folders, from GGUF, and decoded token by token."""

from dataclasses import replace

import numpy as np
import pytest
from family_gguf import write_case
from golden_case import FAMILY_CASES, GOLDEN

from lorawgpu.verify.cases import read_case
from lorawgpu.verify.compare import judge
from lorawgpu.verify.run import run_case
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.hf_folder import HfFolder

# Case -> architecture of the GGUF form; Mistral's loses the window there, so it is another model.
GGUF = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_dense": "gemma4",
    "smollm3": "smollm3",
    "granite": "granite",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "qwen2_yarn": "qwen2",
    "gemma3_multimodal": "gemma3",
    "ministral3": "mistral3",
    "phi3_plain": "phi3",
    "phi3_mixed": "phi3",
    "olmo3": "olmo2",
}
# Among these, a layer has every option.
EVERY_OPTION = ("qwen2", "gemma2", "gemma4", "gemma4_dense", "granite", "phi3", "olmo2", "ministral3")
ONE_STEP = ("loss", "logits", "grad.")  # what a quick test compares


def one_step(case):
    return replace(case, expected={k: v for k, v in case.expected.items() if k.startswith(ONE_STEP)})


def assert_passes(device, kernels, case, **options):
    row, faults = judge(case, run_case(device, case, kernels, **options))
    assert not faults, faults
    return row


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_loss_logits_and_every_gradient(device, kernels, name):
    row = assert_passes(device, kernels, one_step(read_case(GOLDEN / name)))
    assert row["grad_rel_max"] < 2e-5  # float32 noise, far below what is tolerated


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_three_steps_and_greedy_text(device, kernels, name):
    row = assert_passes(device, kernels, read_case(GOLDEN / name))
    assert row["greedy_match"]


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_OPTION)
@pytest.mark.parametrize("options", [{"attention": "chain"}, {"checkpointing": True}], ids=["chain", "checkpointing"])
def test_other_plans(device, kernels, name, options):
    assert_passes(device, kernels, one_step(read_case(GOLDEN / name)), **options)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_is_the_same_model(tmp_path, name):
    """Every weight, and every frequency, equals that of the Hugging Face folder."""
    ours = GgufCheckpoint(write_case(GOLDEN / name, tmp_path / "model.gguf", GGUF[name]), name)
    theirs = HfFolder(GOLDEN / name, name)
    assert ours.keys() == theirs.keys() and ours.config.eos_token_ids == theirs.config.eos_token_ids
    for key in theirs.keys():
        read = "norm" if key.endswith("norm.weight") else "dense"
        a, b = (getattr(checkpoint, read)(key) for checkpoint in (ours, theirs))
        a, b = (x if read == "norm" else x.float32() for x in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=key)
    for a, b in zip(ours.config.layers, theirs.config.layers, strict=True):
        assert plain(a) == plain(b)
        for long in (False, True):
            np.testing.assert_allclose(*(x.attention.rope.inv_freq(x.attention.head_dim, long) for x in (a, b)), 1e-6)
        np.testing.assert_allclose(*(x.attention.rope.query_scale(np.arange(40)) for x in (a, b)), 1e-6)
        assert a.attention.rope.attention_factor == pytest.approx(b.attention.rope.attention_factor)
        assert (a.attention.scale, a.residual_scale) == pytest.approx((b.attention.scale, b.residual_scale))
    for number in ("rms_norm_eps", "embed_scale", "logits_scale", "final_softcap"):
        assert getattr(ours.config, number) == pytest.approx(getattr(theirs.config, number))


def plain(layer):
    """The layer's spec without the numbers that GGUF stores in float32."""
    return replace(layer, attention=replace(layer.attention, rope=None, scale=0.0), residual_scale=0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", GGUF)
def test_golden_case_through_gguf(device, kernels, tmp_path, name):
    """Norms with or without +1, permuted rows and renamed tensors come back right."""
    path = write_case(GOLDEN / name, tmp_path / "model.gguf", GGUF[name])
    case = read_case(GOLDEN / name)
    assert_passes(device, kernels, one_step(replace(case, checkpoint=GgufCheckpoint(path, name))))
