"""Hugging Face folders: the storage formats, missing, damaged or hostile files, and memory use."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorawgpu.errors import UserError
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.weights.hf_folder import module_name
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import expected_tensors, quantize_master, unused_tensors

GOLDEN = Path(__file__).parent / "golden"
DOWN = "model.layers.0.mlp.down_proj.weight"


def unpack(packed, out):
    """T from its packed form, by definition: bits 2i..2i+1 of byte [j, c] hold T[j + i*r, c] + 1."""
    rows = packed.shape[0]
    return np.array([(packed[n % rows] >> (2 * (n // rows)) & 3).astype(np.int8) - 1 for n in range(out)])


def bf16(values):
    """Float32 to the nearest BF16, as bits (ties away; the tests use values that BF16 holds exactly)."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def copy_case(case, tmp_path, **config_changes):
    """A writable copy of a golden case's model."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copyfile(GOLDEN / case / "model.safetensors", folder / "model.safetensors")
    config = json.loads((GOLDEN / case / "config.json").read_text()) | config_changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tensors(path, tensors):
    """A safetensors file of `{name: (dtype, array)}`, BF16 as uint16 bits (the library has no NumPy type for it)."""
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_tensors(folder):
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: (entry.dtype, np.array(file.read(name))) for name, entry in file.entries.items()}


def rewrite(folder, change):
    """Apply `change` to the tensors of a folder."""
    tensors = read_tensors(folder)
    change(tensors)
    write_tensors(folder / "model.safetensors", tensors)


def error_of(folder):
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("case", [path.parent.name for path in GOLDEN.glob("*/config.json")])
def test_every_tensor_of_the_golden_cases(case):
    checkpoint = open_checkpoint(GOLDEN / case)
    raw = SafetensorsFile(GOLDEN / case / "model.safetensors")
    text = (checkpoint.config.prefix, "lm_head.")  # the rest is that of a vision tower
    names = {module_name(name, checkpoint.config.prefix): name for name in raw.entries}
    stored = {name for name in names if name.startswith(text) and not name.endswith("_scale")}
    assert set(checkpoint.keys()) == stored - unused_tensors(checkpoint.config)
    assert checkpoint.name == str(GOLDEN / case)
    for name, shape in expected_tensors(checkpoint.config).items():
        if checkpoint.config.ternary and name.endswith("_proj.weight"):
            ternary = checkpoint.ternary(name)
            assert (ternary.out, ternary.packed.shape) == (shape[0], (-(-shape[0] // 4), shape[1]))
            assert np.isin(unpack(ternary.packed, ternary.out), (-1, 0, 1)).all()
        else:
            dense = checkpoint.dense(name)
            assert (dense.dtype, dense.data.shape, dense.data.dtype) == ("bf16", shape, np.uint16)
            np.testing.assert_array_equal(dense.data, raw.read(names[name]))


def test_head_name():
    assert open_checkpoint(GOLDEN / "llama_bitlinear").head_name == "lm_head.weight"
    dense = open_checkpoint(GOLDEN / "llama_dense")
    assert dense.head_name == "model.embed_tokens.weight"


def test_scale_multiplies_or_divides(tmp_path):
    bits = read_tensors(GOLDEN / "bitnet_packed")[f"{DOWN}_scale"][1]
    stored = float((bits.astype(np.uint32) << 16).view(np.float32)[0])
    assert open_checkpoint(GOLDEN / "bitnet_packed").ternary(DOWN).scale == stored
    divide = copy_case("bitnet_packed", tmp_path, quantization_config={"quant_method": "bitnet"})
    assert open_checkpoint(divide).ternary(DOWN).scale == np.float32(1) / np.float32(stored)


def test_master_weights_are_quantized_by_their_mean():
    checkpoint = open_checkpoint(GOLDEN / "bitnet_master")
    master = checkpoint.dense(DOWN).float32()
    ternary = checkpoint.ternary(DOWN)
    mean = np.float32(np.abs(master).mean(dtype=np.float64))
    assert ternary.scale == mean
    np.testing.assert_array_equal(unpack(ternary.packed, ternary.out), np.clip(np.rint(master / mean), -1, 1))


@pytest.mark.parametrize("out", [1, 2, 3, 4, 5, 7, 64])
def test_packing_any_number_of_rows(out):
    from lorawgpu.weights.tensors import Dense

    values = np.random.default_rng(out).standard_normal((out, 9)).astype(np.float32)
    packed, scale = quantize_master(Dense(values, "f32"), "w")
    np.testing.assert_array_equal(unpack(packed, out), np.clip(np.rint(values / np.float32(scale)), -1, 1))
    assert (unpack(packed, 4 * packed.shape[0])[out:] == 0).all()  # rows past the end are T = 0


def test_all_zero_master_weights_get_the_smallest_scale():
    from lorawgpu.weights.tensors import Dense

    packed, scale = quantize_master(Dense(np.zeros((4, 3), np.float32), "f32"), "w")
    assert scale == np.float32(1e-5)
    assert (unpack(packed, 4) == 0).all()


def test_unpacked_ternary_weights_are_packed(tmp_path):
    folder = copy_case("bitnet_packed", tmp_path)
    wanted = open_checkpoint(GOLDEN / "bitnet_packed").ternary(DOWN)

    def unpacked(tensors):
        tensors[DOWN] = ("F32", unpack(wanted.packed, wanted.out).astype(np.float32))

    rewrite(folder, unpacked)
    got = open_checkpoint(folder).ternary(DOWN)
    np.testing.assert_array_equal(got.packed, wanted.packed)
    assert got.scale == wanted.scale
    rewrite(folder, lambda tensors: tensors[DOWN][1].__setitem__((0, 0), 0.5))
    with pytest.raises(UserError, match="other than -1, 0 and 1"):
        open_checkpoint(folder).ternary(DOWN)


@pytest.mark.parametrize(("dtype", "kind"), [("F16", "f16"), ("F32", "f32"), ("BF16", "bf16")])
def test_dense_stays_as_stored(tmp_path, dtype, kind):
    folder = copy_case("llama_dense", tmp_path)
    values = np.linspace(-2, 2, 64 * 160, dtype=np.float32).reshape(64, 160)
    stored = {"F16": values.astype(np.float16), "F32": values, "BF16": bf16(values)}[dtype]
    rewrite(folder, lambda tensors: tensors.__setitem__(DOWN, (dtype, stored)))
    dense = open_checkpoint(folder).dense(DOWN)
    assert dense.dtype == kind
    np.testing.assert_array_equal(dense.data, stored)
    tolerance = {"f16": 2**-11, "f32": 0, "bf16": 2**-7}[kind]  # half a step; BF16 above truncates: a whole one
    np.testing.assert_allclose(dense.float32(), values, rtol=tolerance, atol=1e-6)


def test_missing_tensors_are_named(tmp_path):
    folder = copy_case("bitnet_packed", tmp_path)
    rewrite(folder, lambda tensors: tensors.pop(f"{DOWN}_scale"))
    assert f"{DOWN}_scale" in error_of(folder)
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "2 tensors" in error_of(folder)


@pytest.mark.parametrize("bias", ["model.layers.0.self_attn.q_proj.bias", "lm_head.bias"])
def test_an_unknown_tensor_is_named(tmp_path, bias):
    folder = copy_case("llama_dense", tmp_path)
    rewrite(folder, lambda tensors: tensors.__setitem__(bias, ("F32", np.zeros(64, np.float32))))
    assert bias in error_of(folder)


def test_tied_head_and_rotary_buffers_may_be_stored(tmp_path):
    folder = copy_case("llama_dense", tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(8, np.float32))

    rewrite(folder, add)
    assert "lm_head.weight" not in open_checkpoint(folder).keys()


def untied(tmp_path):
    """The tied dense model with a head of its own, as `test_transformers_does_not_tie_them` reads it."""
    folder = copy_case("llama_dense", tmp_path)

    def add(tensors):
        dtype, embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = (dtype, embedding[::-1].copy())

    rewrite(folder, add)
    return folder


def test_a_head_of_its_own_is_not_tied_and_a_note_says_so(tmp_path, capsys):
    checkpoint = open_checkpoint(untied(tmp_path))
    err = capsys.readouterr().err
    assert "config.json says tie_word_embeddings: true, but lm_head.weight differs" in err and err.count("note:") == 1
    assert checkpoint.head_name == "lm_head.weight" and not checkpoint.config.tie_word_embeddings
    head, embedding = (checkpoint.dense(name).data for name in ("lm_head.weight", "model.embed_tokens.weight"))
    np.testing.assert_array_equal(head, embedding[::-1])


@pytest.mark.reference
def test_transformers_does_not_tie_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = untied(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    head, embedding = model.lm_head.weight.detach().numpy(), model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(head, open_checkpoint(folder).dense("lm_head.weight").float32())
    np.testing.assert_array_equal(head, embedding[::-1])


def test_an_equal_head_of_another_dtype_is_tied(tmp_path, capsys):
    folder = copy_case("llama_dense", tmp_path)

    def add(tensors):
        bits = tensors["model.embed_tokens.weight"][1]
        tensors["lm_head.weight"] = ("F32", (bits.astype(np.uint32) << 16).view(np.float32))

    rewrite(folder, add)
    assert open_checkpoint(folder).config.tie_word_embeddings and capsys.readouterr().err == ""


def test_a_head_without_an_embedding_is_both(tmp_path):
    """As transformers: the parameter that exists is tied to the other."""
    folder = copy_case("llama_dense", tmp_path)
    want = open_checkpoint(folder).dense("model.embed_tokens.weight").data.copy()
    rewrite(folder, lambda tensors: tensors.__setitem__("lm_head.weight", tensors.pop("model.embed_tokens.weight")))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.head_name == "model.embed_tokens.weight" and "lm_head.weight" not in checkpoint.keys()
    np.testing.assert_array_equal(checkpoint.dense("model.embed_tokens.weight").data, want)


def test_wrong_shapes_and_stores_are_named(tmp_path):
    folder = copy_case("llama_dense", tmp_path)
    rewrite(folder, lambda tensors: tensors.__setitem__(DOWN, ("F32", np.zeros((64, 161), np.float32))))
    assert DOWN in error_of(folder) and "[64, 160]" in error_of(folder)
    rewrite(folder, lambda tensors: tensors.__setitem__(DOWN, ("U8", np.zeros((16, 160), np.uint8))))
    assert DOWN in error_of(folder) and "looks packed" in error_of(folder)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        (f"{DOWN}_scale", ("F32", np.array([np.nan], np.float32)), "weight_scale is"),
        (f"{DOWN}_scale", ("F32", np.array([0], np.float32)), "weight_scale is"),
        (f"{DOWN}_scale", ("F32", np.ones(32, np.float32)), "weight_scale is"),
        (DOWN, ("U8", np.full((8, 64), 0b11, np.uint8)), "non-ternary"),
    ],
)
def test_impossible_ternary_values(tmp_path, name, value, named):
    folder = copy_case("bitnet_packed", tmp_path)
    rewrite(folder, lambda tensors: tensors.__setitem__(name, value))
    with pytest.raises(UserError, match=named):
        open_checkpoint(folder).ternary(DOWN)


def test_master_weights_with_nan_are_named(tmp_path):
    folder = copy_case("bitnet_master", tmp_path)
    rewrite(folder, lambda tensors: tensors[DOWN][1].__setitem__((0, 0), 0x7FC0))
    with pytest.raises(UserError, match="non-finite"):
        open_checkpoint(folder).ternary(DOWN)


def test_eos_tokens_of_the_generation_config_are_added(tmp_path):
    folder = copy_case("llama_dense", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_checkpoint(folder).config.eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    assert "generation_config.json" in error_of(folder)


def test_what_is_not_a_model(tmp_path):
    assert "config.json" in error_of(tmp_path)
    assert "no such file or folder" in error_of(tmp_path / "absent")
    assert "no built-in model" in error_of("builtin:nothing")
    assert "name the folder" in error_of(GOLDEN / "llama_dense" / "model.safetensors")
    folder = copy_case("llama_dense", tmp_path)
    (folder / "config.json").write_text("[1]")
    assert "JSON object" in error_of(folder)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in error_of(folder)
    shutil.copyfile(GOLDEN / "llama_dense" / "config.json", folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights (.bin, .pt) are not supported" in error_of(folder)


MEMORY_CHILD = """
import resource, sys
from lorawgpu.weights.loader import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in checkpoint.keys():
    checkpoint.dense(name).data.sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux only")
def test_reading_takes_the_memory_of_one_tensor(tmp_path):
    width, layers = 1024, 2
    config = json.loads((GOLDEN / "llama_dense" / "config.json").read_text())
    config |= {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": 256, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from lorawgpu.families.hf import from_hf

    shapes = expected_tensors(from_hf(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    total = (tmp_path / "model.safetensors").stat().st_size
    largest = 8 << 20
    assert total > 7 * largest  # else the bound below proves nothing
    child = subprocess.run([sys.executable, "-c", MEMORY_CHILD, tmp_path], capture_output=True, text=True, check=True)
    assert int(child.stdout) * 1024 < 3 * largest


def test_loading_does_not_import_wgpu():
    code = "import sys; import lorawgpu.weights.loader, lorawgpu.tokenizer.hf; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_library_reads_the_same_bytes():
    """Our header reader against the safetensors library on the packed weights (it cannot read BF16 into NumPy)."""
    path = GOLDEN / "bitnet_packed" / "model.safetensors"
    from safetensors import safe_open

    with safe_open(path, "numpy") as theirs:
        np.testing.assert_array_equal(SafetensorsFile(path).read(DOWN), theirs.get_tensor(DOWN))
