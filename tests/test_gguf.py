"""GGUF files: the same model as its Hugging Face folder, refusals by name, and fuzzed headers."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorawgpu.errors import UserError
from lorawgpu.families.llama import GGUF
from lorawgpu.files.gguf import GgufFile
from lorawgpu.weights.gguf_checkpoint import TOP_NAMES, unpermute
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import expected_tensors

GOLDEN = Path(__file__).parent / "golden"
GGUF_NAMES = {hf: name for name, hf in GGUF.layer_names.items()}
GGUF_NAMES |= {f"model.{hf}.weight": name for name, hf in TOP_NAMES.items()} | {"lm_head.weight": "output"}
Q = gguf.GGMLQuantizationType


def gguf_name(hf):
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    if hf in GGUF_NAMES:
        return f"{GGUF_NAMES[hf]}.weight"
    _, _, layer, *part, kind = hf.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(part)]}.{kind}"


def permute(weight, heads):
    """The row order that llama.cpp's converter writes for q and k (its `LlamaModel.permute`)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, types=None, metadata=None, arch="llama", skip=(), extra=None):
    """The dense golden model as GGUF: `types` by HF name (default F32), `metadata` changes (None removes a key)."""
    source = open_checkpoint(GOLDEN / "llama_dense")
    config, layer = source.config, source.config.layers[0]
    attention = layer.attention
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": layer.mlp.width,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": attention.rope.theta,
        "rope.dimension_count": attention.head_dim,
    }
    for key, value in (values | (metadata or {})).items():
        key = key if "tokenizer." in key or "general." in key or "split." in key else f"llama.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
               list: writer.add_array}.get(type(value))  # fmt: skip
        if add:
            add(key, value)
    heads = {"q_proj": attention.heads, "k_proj": attention.kv_heads}
    for name in expected_tensors(config):
        if name in skip:
            continue
        weight = source.dense(name).float32()
        projection = name.split(".")[-2]
        if projection in heads:
            weight = permute(weight, heads[projection])
        add_tensor(writer, gguf_name(name), weight, (types or {}).get(name, Q.F32))
    for name, weight in (extra or {}).items():
        add_tensor(writer, name, weight, Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer, name, weight, kind):
    plain = kind in (Q.F32, Q.F16)
    writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=None if plain else kind)


def error_of(path):
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


UP, Q_PROJ = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
K_PROJ, V_PROJ = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"


def test_same_model_as_its_folder(tmp_path):
    folder = open_checkpoint(GOLDEN / "llama_dense")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    ours, theirs = checkpoint.config, folder.config
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-7)  # stored as float32
    for key in ("vocab_size", "layers", "tie_word_embeddings", "family"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert checkpoint.keys() == folder.keys()
    for name in folder.keys():
        assert checkpoint.dense(name).dtype == "f32"
        np.testing.assert_array_equal(checkpoint.dense(name).data, folder.dense(name).float32())


def test_plain_types_stay_as_stored_and_blocks_become_float32(tmp_path):
    folder = open_checkpoint(GOLDEN / "llama_dense")
    types = {Q_PROJ: Q.BF16, K_PROJ: Q.F16, V_PROJ: Q.Q8_0, UP: Q.Q4_0}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", types))
    assert {name: checkpoint.dense(name).dtype for name in types} == {
        Q_PROJ: "bf16", K_PROJ: "f16", V_PROJ: "f32", UP: "f32"}  # fmt: skip
    np.testing.assert_array_equal(checkpoint.dense(Q_PROJ).data, folder.dense(Q_PROJ).data)  # un-permuted bits
    np.testing.assert_array_equal(checkpoint.dense(K_PROJ).data, folder.dense(K_PROJ).float32().astype(np.float16))
    for name in (V_PROJ, UP):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(folder.dense(name).float32(), types[name]), types[name])
        np.testing.assert_array_equal(checkpoint.dense(name).data, wanted)


def test_blocks_stay_blocks_and_others_become_float32(tmp_path, capsys):
    """Also where rows change their order: `matrix` holds the file's bytes, `store` names their store."""
    types = {Q_PROJ: Q.Q4_0, V_PROJ: Q.Q8_0, K_PROJ: Q.F16}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", types | {UP: Q.MXFP4}))
    assert capsys.readouterr().err == f"note: {checkpoint.path}: {UP} of MXFP4 becomes float32, 3.81e-05 GiB\n"
    assert (checkpoint.store(UP), checkpoint.matrix(UP).dtype) == ("f32", "f32")
    for name, store in ((Q_PROJ, "q4_0"), (V_PROJ, "q8_0")):
        matrix = checkpoint.matrix(name)
        assert checkpoint.store(name) == matrix.store == store and name in matrix.where
        np.testing.assert_array_equal(gguf.quants.dequantize(matrix.data, types[name]), checkpoint.dense(name).data)
    assert (checkpoint.store(K_PROJ), checkpoint.matrix(K_PROJ).dtype) == ("f16", "f16")


@pytest.mark.parametrize("heads", [1, 3])
def test_unpermute_is_the_inverse(heads):
    weight = np.arange(heads * 8 * 5).reshape(heads * 8, 5)
    assert (permute(weight, heads) != weight).any()
    np.testing.assert_array_equal(unpermute(permute(weight, heads), heads), weight)


def test_header_agrees_with_the_library(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {UP: Q.Q4_0, Q_PROJ: Q.BF16}, {"tokenizer.ggml.tokens": ["a", "ü", ""]})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, field in fields.items():
        assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(tensor.shape.tolist())[::-1]


def test_llama3_frequency_factors(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    rope = (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))
        .config.layers[0]
        .attention.rope
    )
    plain = open_checkpoint(GOLDEN / "llama_dense").config.layers[0].attention.rope
    np.testing.assert_allclose(rope.inv_freq(16), plain.inv_freq(16) / factors, rtol=1e-12)
    wrong = write_gguf(tmp_path / "w.gguf", extra={"rope_freqs.weight": factors[:4]})
    assert "frequency factors" in error_of(wrong)


def test_separate_head_and_ids(tmp_path):
    head = np.ones((320, 64), np.float32)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=ids, extra={"output.weight": head}))
    assert checkpoint.head_name == "lm_head.weight"
    np.testing.assert_array_equal(checkpoint.dense("lm_head.weight").data, head)
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids) == (1, (2, 5))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arch": "qwen2"}, "qwen2"),
        ({"metadata": {"expert_count": 8}}, "experts"),
        ({"metadata": {"attention.sliding_window": 4096}}, "sliding_window"),
        ({"metadata": {"rope.scaling.type": "dynamic"}}, "rope scaling"),
        ({"metadata": {"logit_scale": 0.5}}, "logit_scale"),
        ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count"),
        ({"metadata": {"attention.value_length": 8}}, "attention.value_length"),
        ({"metadata": {"block_count": None}}, "block_count is missing"),
        ({"metadata": {"block_count": 3}}, "model.layers.2"),
        ({"metadata": {"attention.head_count": 0}}, "attention.head_count is 0"),
        ({"metadata": {"feed_forward_length": [160, 80]}}, "feed_forward_length"),
        ({"metadata": {"general.type": "adapter"}}, "general.type"),
        ({"metadata": {"split.count": 3}}, "one part of a split model"),
        ({"skip": (UP,)}, UP),
        ({"skip": ("model.embed_tokens.weight",)}, "token_embd.weight"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "self_attn.q_proj.bias"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}}, "attn_q_norm"),
    ],
)
def test_rejected_by_name(tmp_path, changes, named):
    assert named in error_of(write_gguf(tmp_path / "m.gguf", **changes))


def with_type(path, name, number):
    """Overwrite the type number of a tensor in the header."""
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name)
    dims = struct.unpack_from("<I", raw, at)[0]
    struct.pack_into("<I", raw, at + 4 + 8 * dims, number)
    path.write_bytes(raw)
    return path


def test_bitnet_types_are_rejected_with_advice(tmp_path):
    path = with_type(write_gguf(tmp_path / "m.gguf"), "blk.0.ffn_up.weight", 38)
    message = error_of(path)
    assert "TL1" in message and "Hugging Face folder" in message
    assert "if its type 39 is bitnet.cpp's TL2" in error_of(with_type(path, "blk.0.ffn_up.weight", 39))
    assert "type number 999" in error_of(with_type(path, "blk.0.ffn_up.weight", 999))


def test_blocks_that_the_library_cannot_read_are_rejected(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra={"other.weight": np.zeros((2, 256), np.float32)})
    file = GgufFile(path)
    info = file.tensors["other.weight"]
    file.tensors["other.weight"] = type(info)("Q8_K", (2, 256), info.offset, 2 * 292)
    with pytest.raises(UserError, match="Q8_K"):
        file.read("other.weight")


def write_ternary(path, kind, head_scale=0.0, dense=()):
    """A Llama of one layer whose linear layers are {-0.5, 0, 0.5} in blocks of `kind`, but for those in `dense` (GGUF's
    names); the first value of each is `head_scale` if that is given. Returns the values by GGUF's name."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 256,
             "attention.head_count": 4}  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng, made = np.random.default_rng(0), {}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        made[part] = rng.integers(-1, 2, (256, 256)).astype(np.float32) / 2
        made[part][7] = 0  # blocks of nothing have scale 0
        made[part][0, 0] = head_scale or made[part][0, 0]
        add_tensor(writer, f"blk.0.{part}.weight", made[part], Q.F16 if part in dense else kind)
    for name, shape in (
        ("token_embd", (32, 256)),
        ("output_norm", 256),
        *((f"blk.0.{n}_norm", 256) for n in ("attn", "ffn")),
    ):
        add_tensor(writer, f"{name}.weight", np.ones(shape, np.float32), Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


@pytest.mark.parametrize("kind", [Q.TQ1_0, Q.TQ2_0])
def test_a_ternary_file_is_a_model_with_quantized_activations(tmp_path, kind):
    made = write_ternary(tmp_path / "m.gguf", kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.ternary == "multiply"
    for part, hf in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        matrix = checkpoint.matrix(f"model.layers.0.{hf}.weight")
        wanted = unpermute(made[part], 4) if part == "attn_q" else made[part]
        assert matrix.scale == 0.5 and checkpoint.store(f"model.layers.0.{hf}.weight") == "ternary"
        np.testing.assert_array_equal(matrix.values() * 0.5, wanted)
    assert checkpoint.store("model.embed_tokens.weight") == "f32"


def test_ternary_files_that_are_not_one_ternary_model(tmp_path):
    write_ternary(tmp_path / "two.gguf", Q.TQ2_0, head_scale=1.0)
    with pytest.raises(UserError, match="mlp.up_proj.weight: its blocks have different scales"):
        open_checkpoint(tmp_path / "two.gguf").matrix("model.layers.0.mlp.up_proj.weight")
    write_ternary(tmp_path / "mixed.gguf", Q.TQ1_0, dense=("ffn_up",))
    assert "mlp.up_proj.weight is not; models of both are not supported" in error_of(tmp_path / "mixed.gguf")


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "too short"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata keys cannot fit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(9), "the file ends at"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**59), "strings of 'k'"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**59), "the file ends at"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "value type 9"),
        (b"GGUF" + struct.pack("<IQQQcII", 3, 0, 1, 1, b"\xff", 4, 4), "not UTF-8"),
    ],
)
def test_damaged_headers(tmp_path, raw, named):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert named in error_of(path)


def test_a_truncated_file_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-4096])
    assert "truncated" in error_of(path)


def small(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["one", "two"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("x", 0.5)
    writer.add_tensor("a", np.arange(8, dtype=np.float32))
    writer.add_tensor("b", gguf.quants.quantize(np.ones((2, 32), np.float32), Q.Q4_0), raw_dtype=Q.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "double", "end", "huge"]), st.integers(0, 400), st.integers(1, 255)),
    min_size=1,
    max_size=4,
)


def damage(raw, edits):
    """Flip, cut, repeat or truncate bytes, or set eight of them to a huge number."""
    raw = bytearray(raw)
    for kind, at, amount in edits:
        at = min(at, len(raw) - 1)
        if kind == "flip":
            raw[at] ^= amount
        elif kind == "cut":
            del raw[at : at + amount % 40]
        elif kind == "double":
            raw[at:at] = raw[at : at + amount % 40]
        elif kind == "end":
            del raw[max(at, 24) :]
        else:
            raw[at : at + 8] = struct.pack("<Q", 1 << amount % 64)
    return bytes(raw)


@settings(max_examples=400, deadline=None)
@example([])
@given(EDITS)
def test_fuzzed_files_are_read_within_bounds_or_rejected(tmp_path_factory, edits):
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(damage(small(path), edits))
    try:
        file = GgufFile(path)
        tensors = [file.read(name)[0] for name in file.tensors]
    except UserError as error:
        assert len(str(error)) < 1000
        return
    # dequantizing expands a block by the ratio of its type; the densest ones have 1 bit per weight
    assert sum(tensor.nbytes for tensor in tensors) <= 32 * path.stat().st_size
