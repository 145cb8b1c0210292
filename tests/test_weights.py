"""Weights on the GPU, read back: exact, padded, stacked, and cut into bindings."""

import numpy as np
import pytest
from golden_case import GOLDEN
from oplab import Lab, limited, normal
from tiny_model import TinyCheckpoint, tiny_config

from lorawgpu.doctor.matmul import MATRICES
from lorawgpu.errors import UserError
from lorawgpu.families.hf import from_hf
from lorawgpu.gpu import open_dry_device, padded
from lorawgpu.ops.embedding import embedding_forward
from lorawgpu.ops.stores import STORES, TERNARY
from lorawgpu.reference.ternary import ternary_pack
from lorawgpu.verify.cases import own_model
from lorawgpu.weights.blocks import records
from lorawgpu.weights.device import codes, empty_weight, lines_of, pack_blocks, upload_weight
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import SHAPES, meta_model, mix_of, synthetic_model
from lorawgpu.weights.tensors import Blocks, Dense, Ternary, expected_tensors


def stored(device, weight):
    """All parts, concatenated; each must begin where the previous one ends."""
    assert [p.start for p in weight.parts] == [0, *(p.stop for p in weight.parts[:-1])]
    assert weight.parts[-1].stop == weight.rows
    return np.concatenate([device.read(p.tensor) for p in weight.parts])


def unpack_blocks(words):
    """uint32 [N/4, K/4] -> T int [N, K]: bits 8c+2r of word (i, j) hold T[4i+r, 4j+c] + 1."""
    rows = [[words >> np.uint32(8 * c + 2 * r) & 3 for c in range(4)] for r in range(4)]
    blocks = np.moveaxis(np.array(rows, int), (0, 1), (1, 3)) - 1  # [N/4, r, K/4, c]
    return blocks.reshape(4 * words.shape[0], 4 * words.shape[1])


def ternary(out, n, seed=0):
    return np.random.default_rng((seed, out, n)).integers(-1, 2, (out, n))


@pytest.mark.parametrize("out, n", [(1, 1), (16, 16), (17, 33), (50, 123)])
def test_ternary_blocks(out, n):
    T = ternary(out, n)
    got = unpack_blocks(pack_blocks((T + 1).astype(np.uint8)))
    assert got.shape == (padded(out), padded(n))
    assert np.array_equal(got[:out, :n], T)
    assert not got[out:].any() and not got[:, n:].any()  # the padding is T = 0


@pytest.mark.parametrize("out", [4, 5, 6, 7])
def test_codes_of_the_packed_store(out):
    T = ternary(out, 9)
    assert np.array_equal(codes(Ternary(ternary_pack(T), out, 1.0)), T + 1)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("binding", [None, 16 * 48 * 4])
def test_dense_is_kept_as_stored(device, dtype, binding):
    arrays = [normal(n, 40, seed=n).astype(np.float16 if dtype == "f16" else np.float32) for n in (33, 5, 60)]
    if dtype == "bf16":
        arrays = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in arrays]
    weight = upload_weight(limited(device, binding) if binding else device, [Dense(a, dtype) for a in arrays], "w")
    assert (
        {p.store.name for p in weight.parts} == {dtype}
        and weight.segments.ends == (48, 64, 128)
        and weight.columns == 48
    )
    assert len(weight.parts) == (1 if binding is None else 128 // (16 if dtype == "f32" else 32))
    got = stored(device, weight)
    assert weight.nbytes == got.nbytes
    for array, end in zip(arrays, weight.segments.ends, strict=True):
        start = end - padded(len(array))
        assert np.array_equal(got[start : start + len(array), :40], array)
        got[start : start + len(array), :40] = 0
    assert not got.any()  # the padding


@pytest.mark.parametrize("binding", [None, 16 * 48 * 4])
def test_stores_that_differ_are_kept_in_parts_of_their_own(device, binding):
    """bf16, bf16, f32: one part for the first two, or as many as the bindings hold."""
    small = [(normal(n, 40, seed=n).view(np.uint32) >> 16).astype(np.uint16) for n in (33, 5)]
    full, limit = normal(60, 40, seed=1), limited(device, binding) if binding else device
    weight = upload_weight(limit, [*(Dense(a, "bf16") for a in small), Dense(full, "f32")], "w")
    cuts = [(p.start, p.stop, p.store.name, p.tensor.dtype) for p in weight.parts]
    lots = [(0, 32), (32, 64)] if binding else [(0, 64)]
    fulls = [(at, at + 16) for at in range(64, 128, 16)] if binding else [(64, 128)]
    assert cuts == [(*lot, "bf16", "bf16") for lot in lots] + [(*lot, "f32", "f32") for lot in fulls]
    assert weight.segments.ends == (48, 64, 128) and not weight.int8_input
    halves = np.concatenate([device.read(p.tensor) for p in weight.parts if p.stop <= 64])
    assert np.array_equal(halves[:33, :40], small[0]) and np.array_equal(halves[48:53, :40], small[1])
    assert np.array_equal(
        np.concatenate([device.read(p.tensor) for p in weight.parts if p.start >= 64])[:60, :40], full
    )


@pytest.mark.parametrize(("binding", "cuts"), [(None, [160, 224]), (11600, [64, 128, 160, 224])])
def test_blocks_are_stacked_and_cut(device, binding, cuts):
    """Odd numbers of rows, two types of blocks in one weight, and parts of at most a binding."""
    made = [MATRICES[store](rows, 256, 0)[0] for store, rows in (("q4_k", 133), ("q4_k", 5), ("q5_k", 60))]
    weight = upload_weight(limited(device, binding) if binding else device, made, "w")
    assert weight.segments.ends == (144, 160, 224) and weight.columns == 256
    assert [p.stop for p in weight.parts] == cuts and weight.parts[-1].store.name == "q5_k"
    got = [device.read(p.tensor).ravel() for p in weight.parts]
    assert weight.nbytes == sum(words.nbytes for words in got)
    wanted = []
    for matrix in made:
        words = records(matrix.data, STORES[matrix.store])
        wanted.append(np.pad(words, [(0, padded(len(matrix.data)) // 4 - len(words)), (0, 0)]).ravel())
    assert np.array_equal(np.concatenate(got), np.concatenate(wanted))


def test_a_scale_that_is_not_finite_is_damage(device):
    matrix, _ = MATRICES["q8_0"](3, 32, 0)
    matrix.data[1, :2] = [0, 0x7C]
    with pytest.raises(UserError, match=r"m.gguf: w: has scales that are not finite; the file is damaged"):
        upload_weight(device, [Blocks(matrix.data, "q8_0", "m.gguf: w")], "w")


def test_what_is_no_matrix_is_refused():
    with pytest.raises(TypeError, match="ndarray is not a matrix that a device can hold"):
        lines_of(np.zeros((16, 16)))


@pytest.mark.parametrize("binding", [None, 16 * 12 * 4])
def test_ternary_is_stacked_and_split(device, binding):
    matrices = [ternary(n, 40) for n in (33, 5, 60)]
    tensors = [Ternary(ternary_pack(T), len(T), 0.5 + i) for i, T in enumerate(matrices)]
    weight = upload_weight(limited(device, binding) if binding else device, tensors, "w")
    assert (weight.rows, weight.columns, weight.int8_input) == (128, 48, True)
    assert weight.segments.ends == (48, 64, 128) and weight.segments.scales == (0.5, 1.5, 2.5)
    assert len(weight.parts) == (1 if binding is None else 2)
    got = unpack_blocks(stored(device, weight))
    assert weight.nbytes == got.size // 4
    for T, end in zip(matrices, weight.segments.ends, strict=True):
        start = end - padded(len(T))
        assert np.array_equal(got[start : start + len(T), :40], T)


def test_no_part_exceeds_a_binding(device):
    limit = 5000
    weight = upload_weight(limited(device, limit), [Dense(normal(200, 16), "f32")], "w")
    assert max(p.tensor.nbytes for p in weight.parts) <= limit and len(weight.parts) > 1


def test_ternary_parts_of_a_real_width():
    """128 MiB hold 52,428 lines of 2,560 bytes; parts end at multiples of 16 lines of four rows."""
    device = open_dry_device(limits="webgpu")
    parts = empty_weight(device, [(TERNARY, 300_000, 1.0)], 2560, "w").parts
    assert [(p.start, p.stop) for p in parts] == [(0, 209_664), (209_664, 300_000)]
    assert [p.tensor.shape for p in parts] == [(52_416, 640), (22_584, 640)]


def mixed_checkpoint():
    """A checkpoint with v and down in bf16, everything else in f32."""
    checkpoint = TinyCheckpoint(tiny_config())
    for name, matrix in checkpoint.weights.items():
        if "v_proj" in name or "down_proj" in name:
            checkpoint.weights[name] = Dense((matrix.data.view(np.uint32) >> 16).astype(np.uint16), "bf16")
    return checkpoint


@pytest.mark.parametrize("case", ["bitnet_packed", "llama_dense", "llama_q4_k_m", "mixed"])
@pytest.mark.parametrize("binding", [1 << 20, 1000])
def test_a_dry_plan_has_the_parts_that_are_loaded(device, case, binding):
    checkpoint = mixed_checkpoint() if case == "mixed" else open_checkpoint(own_model(GOLDEN / case))
    loaded = load_model(limited(device, binding), checkpoint)
    meta = meta_model(limited(open_dry_device(), binding), checkpoint)
    assert cuts(meta) == cuts(loaded)
    assert (max(len(parts) for parts in cuts(loaded).values()) > 3) == (binding == 1000)
    assert ({p.store.name for p in loaded.layers[0].weights["qkv"].parts} == {"bf16", "f32"}) == (case == "mixed")


def cuts(model) -> dict:
    """Every weight's parts, by name."""
    weights = {f"{layer.index}.{group}": w for layer in model.layers for group, w in layer.weights.items()}
    return {
        name: [(p.start, p.stop, p.store, p.tensor.shape, p.tensor.dtype, p.tensor.label) for p in weight.parts]
        for name, weight in (weights | {"embedding": model.embedding, "head": model.head}).items()
    }


def test_random_models_hold_what_their_stores_mean(device, kernels):
    tiny = SHAPES["tiny"]
    dense = stored(device, synthetic_model(device, kernels, tiny, "f32").layers[0].weights["gate_up"])
    assert dense.std() == pytest.approx(tiny.hidden_size**-0.5, rel=0.05)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    small = {key: CONFIGS["tiny"][key] for key in sizes} | {"num_hidden_layers": 1}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    bitnet = synthetic_model(device, kernels, from_hf(CONFIGS["bitnet-2b"] | small | special))
    assert bitnet.layers[0].weights["down"].int8_input and not bitnet.head.int8_input
    assert set(np.unique(unpack_blocks(stored(device, bitnet.layers[0].weights["down"])))) == {-1, 0, 1}
    assert set(device.read(bitnet.norm)) == {1.0}
    with pytest.raises(ValueError, match="no random weights in f16"):
        synthetic_model(device, kernels, tiny, "f16")


@pytest.mark.parametrize("store", [store for store in STORES.values() if store.unit])
def test_random_blocks_are_of_the_usual_size(plan, store):
    """Neither NaN nor vanishing: as far from zero as random dense weights are."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256, "num_hidden_layers": 1}
    config = from_hf(CONFIGS["tiny"] | sizes)
    weight = synthetic_model(plan.device, plan.kernels, config, store.name).embedding
    lab = Lab(plan)
    ids, x = lab.input(np.arange(256, dtype=np.int32)), lab.rows(256, 256)
    with lab.section:
        embedding_forward(plan, x.tensor, ids, weight.parts, rows=256, width=256, vocab=256)
    lab.run()
    assert x.value.std() == pytest.approx(256**-0.5, rel=0.1) and abs(x.value.mean()) < 0.2 * x.value.std()


def test_a_mix_of_blocks_is_the_one_of_llama_quantize():
    """Llama-3.2-3B Q4_K_M has 168 tensors of Q4_K and 29 of Q6_K, as llama.cpp prints."""
    config = SHAPES["llama-3.2-3b"]
    stores = [mix_of(config, "q4_k_m")(name) for name, shape in expected_tensors(config).items() if len(shape) > 1]
    assert (stores.count("q4_k"), stores.count("q6_k")) == (168, 29)
    small = mix_of(SHAPES["smollm2-135m"], "q4_k_m")  # rows of 576
    assert (small("model.embed_tokens.weight"), small("model.layers.3.mlp.up_proj.weight")) == ("q8_0", "q5_0")
    assert small("model.layers.4.mlp.down_proj.weight") == "q4_k"  # 1536 columns
    fused = mix_of(SHAPES["phi-4-mini"], "q4_k_m")
    assert fused("model.layers.3.self_attn.qkv_proj.weight") == "q5_k"
