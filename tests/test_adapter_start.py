"""The adapter that a run begins with: shapes, ranks and scales by pattern; a start from a seed, or from another one."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from adapters import LORA, MODEL, alive

from lorawgpu.config.schema import TrainConfig
from lorawgpu.errors import UserError
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import (
    adapter_shapes,
    init_adapter,
    read_adapter,
    start_adapter,
    tensor_names,
    write_adapter,
)


@pytest.fixture
def folder(tmp_path):
    write_adapter(tmp_path, LORA, alive(), "base")
    return tmp_path


def test_shapes_of_all_linear_by_hand():
    lora = replace(LORA, target_modules=LINEAR_MODULES)
    shapes = adapter_shapes(lora, MODEL)
    assert len(shapes) == 3 * 7 * 2
    layer = {name.split("layers.1.")[1]: shape for name, shape in shapes.items() if "layers.1." in name}
    assert layer == {
        "self_attn.q_proj.lora_A.weight": (4, 24), "self_attn.q_proj.lora_B.weight": (32, 4),
        "self_attn.k_proj.lora_A.weight": (4, 24), "self_attn.k_proj.lora_B.weight": (16, 4),
        "self_attn.v_proj.lora_A.weight": (4, 24), "self_attn.v_proj.lora_B.weight": (16, 4),
        "self_attn.o_proj.lora_A.weight": (4, 32), "self_attn.o_proj.lora_B.weight": (24, 4),
        "mlp.gate_proj.lora_A.weight": (4, 24), "mlp.gate_proj.lora_B.weight": (40, 4),
        "mlp.up_proj.lora_A.weight": (4, 24), "mlp.up_proj.lora_B.weight": (40, 4),
        "mlp.down_proj.lora_A.weight": (4, 40), "mlp.down_proj.lora_B.weight": (24, 4),
    }  # fmt: skip


@pytest.mark.parametrize("target", ["wte", "proj", "layers.7.self_attn.q_proj", "_proj", ""])
def test_a_target_that_matches_nothing_is_named(target):
    with pytest.raises(UserError, match=f"'{target}' matches no linear layer of this model; wanted one of q_proj"):
        adapter_shapes(replace(LORA, target_modules=("q_proj", target)), MODEL)


def test_one_string_is_a_pattern_of_whole_paths(tmp_path):
    """As PEFT's, and written as it is, but for a multimodal model only below its text model."""
    pattern = r".*layers\.[12]\..*\.(q|up)_proj"
    lora, tensors = start_adapter(config(lora_target_modules=pattern), MODEL)
    modules = [f"model.layers.{n}.{path}" for n in (1, 2) for path in ("self_attn.q_proj", "mlp.up_proj")]
    assert [name for module in modules for name in tensor_names(module)] == list(tensors)
    write_adapter(tmp_path, lora, tensors, "base")
    assert json.loads((tmp_path / ADAPTER_CONFIG_FILE).read_text())["target_modules"] == pattern
    assert read_adapter(tmp_path, MODEL)[1].keys() == tensors.keys()
    text = replace(MODEL, prefix="model.language_model.")
    lora, tensors = start_adapter(config(lora_target_modules=pattern), text)
    write_adapter(tmp_path, lora, tensors, "base")
    wide = json.loads((tmp_path / ADAPTER_CONFIG_FILE).read_text())["target_modules"]
    assert all(re.fullmatch(wide, module) for module in text.linear_shapes() if lora.targets(module))
    assert lora.targets("model.vision_tower.layers.1.mlp.up_proj")
    assert not re.fullmatch(wide, "model.vision_tower.layers.1.mlp.up_proj")


@pytest.mark.parametrize("pattern", ["q_proj$", r"layers\.0\..*", r"model\.layers\.7\..*"])
def test_a_pattern_that_matches_nothing_is_named(pattern):
    with pytest.raises(UserError, match="matches no linear layer of this model; it has to match whole paths"):
        adapter_shapes(replace(LORA, target_modules=pattern), MODEL)


def test_no_target_at_all():
    with pytest.raises(UserError, match="nothing to train"):
        adapter_shapes(replace(LORA, target_modules=()), MODEL)


@pytest.mark.parametrize(
    ("patterns", "ranks"),
    [
        ({}, [4, 4, 4]),
        ({"q_proj": 2}, [2, 2, 2]),
        ({"layers.1.self_attn.q_proj": 2}, [4, 2, 4]),
        ({"model.layers.1.self_attn.q_proj": 2}, [4, 2, 4]),
        ({r"layers\.[02]\..*q_proj": 2}, [2, 4, 2]),
        ({"proj": 2, "_proj": 3}, [4, 4, 4]),  # not at a dot
        ({"self_attn": 2}, [4, 4, 4]),  # not at the end
        ({"layers.0.self_attn.q_proj": 1, "q_proj": 2}, [1, 2, 2]),  # the first match wins
        ({"k_proj|q_proj": 2}, [2, 2, 2]),
    ],
)
def test_rank_patterns_match_as_in_peft(patterns, ranks):
    lora = replace(LORA, rank_pattern=patterns)
    assert [lora.rank(f"model.layers.{n}.self_attn.q_proj") for n in range(3)] == ranks


def test_scales():
    lora = LoraConfig(4, 8, ("q_proj",), rank_pattern={"layers.1.self_attn.q_proj": 16}, alpha_pattern={"v_proj": 3})
    q0, q1, v0 = (f"model.layers.{n}.self_attn.{m}" for n, m in ((0, "q_proj"), (1, "q_proj"), (0, "v_proj")))
    assert [lora.scale(m) for m in (q0, q1, v0)] == [2.0, 0.5, 0.75]
    assert [replace(lora, use_rslora=True).scale(m) for m in (q0, q1, v0)] == [4.0, 2.0, 1.5]


def test_init_depends_on_seed_and_name_only():
    start = init_adapter(LORA, MODEL, seed=7)
    assert list(start) == list(adapter_shapes(LORA, MODEL))
    for name, tensor in start.items():
        if "lora_B" in name:
            assert not tensor.any()
            continue
        bound = 1 / math.sqrt(tensor.shape[1])
        assert np.abs(tensor).max() <= np.float32(bound) and np.abs(tensor).max() > 0.8 * bound
        # the mean of n uniform values has a deviation of bound / sqrt(3 n): five of them
        assert abs(tensor.mean()) < 5 * bound / math.sqrt(3 * tensor.size)
    more = init_adapter(replace(LORA, target_modules=LINEAR_MODULES), MODEL, seed=7)
    assert all(np.array_equal(more[name], tensor) for name, tensor in start.items())
    other = init_adapter(LORA, MODEL, seed=8)
    a = [name for name in start if "lora_A" in name]
    assert not any(np.array_equal(start[name], other[name]) for name in a)
    assert len({start[name].tobytes() for name in a}) == len(a)


def test_init_is_pinned():
    """The bytes of a fresh adapter are part of what a seed means: a change here changes everyone's runs."""
    a = init_adapter(LORA, MODEL, seed=42)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    start = a[0, :3] * math.sqrt(24)
    np.testing.assert_allclose(start, [0.3531469702720642, 0.4687235951423645, 0.5750375390052795], rtol=1e-6)


def config(**keys):
    return TrainConfig(base_model="m", datasets=[{"path": "d"}], **keys)


def test_start_of_a_fresh_adapter():
    lora, tensors = start_adapter(config(lora_r=2, lora_alpha=4, lora_dropout=0.1, seed=3), MODEL)
    assert lora == LoraConfig(2, 4, LINEAR_MODULES, dropout=0.1)
    expected = init_adapter(lora, MODEL, 3)
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)


def test_start_from_another_adapter(folder):
    lora, tensors = start_adapter(config(adapter=str(folder), lora_dropout=0.2), MODEL)
    assert lora == replace(LORA, dropout=0.2)
    assert all(np.array_equal(tensors[name], tensor) for name, tensor in alive().items())
    agreeing = config(adapter=str(folder), lora_r=4, lora_alpha=8, lora_target_modules=["down_proj", "q_proj"])
    assert start_adapter(agreeing, MODEL)[0] == LORA


@pytest.mark.parametrize("keys", [{"lora_r": 8}, {"lora_alpha": 16}, {"use_rslora": True},
                                  {"lora_target_modules": ["q_proj"]}])  # fmt: skip
def test_settings_that_the_adapter_to_continue_from_contradicts(folder, keys):
    (key,) = keys
    with pytest.raises(UserError, match=f"{key} is .*, but the adapter to continue from .* remove {key}"):
        start_adapter(config(adapter=str(folder), **keys), MODEL)
