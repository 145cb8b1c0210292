"""`export --to gguf --merged`: every family's file holds base plus change, as llama.cpp's converters lay it out."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from family_gguf import converted, write_case
from gguf import quants
from golden_case import GOLDEN

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export import __main__ as command
from lorawgpu.export import gguf_merged, merged
from lorawgpu.export.source import open_source
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.gguf import GgufFile
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint

ARCHS = {
    "llama_dense": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3", "granite": "granite",
    "granite4": "granite", "mistral_window": "llama", "ministral3": "mistral3", "phi3": "phi3", "phi3_plain": "phi3",
    "olmo2": "olmo2", "olmo3": "olmo2", "qwen2_yarn": "qwen2", "gemma2": "gemma2", "gemma3": "gemma3",
    "gemma3_multimodal": "gemma3", "gemma4": "gemma4", "gemma4_dense": "gemma4",
}  # fmt: skip


# What the tests' converter writes and ours leaves to llama.cpp's equal defaults, and ids of the cases' own tokenizer.
LEFT_OUT = {
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "ggml.eos_token_id",
    "ggml.bos_token_id", "ggml.eot_token_id", "name",
}  # fmt: skip


def with_tokenizer(case: str, folder: Path) -> Path:
    """A golden case with a tokenizer of as many tokens as its embedding has rows."""
    shutil.copytree(GOLDEN / case, folder)
    config = json.loads((folder / "config.json").read_text())
    if case.startswith(("gemma2", "gemma3")):  # what llama.cpp takes from the sizes alone
        text = config.get("text_config", config)
        text |= {"query_pre_attn_scalar": text["head_dim"], "sliding_window_pattern": 6}
        text.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(config))
    rows = config.get("text_config", config)["vocab_size"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = ["<unk>", "<s>", "</s>", *alphabet][: rows - 1]
    vocabulary = {token: i for i, token in enumerate([*letters, letters[5] + letters[6]])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(letters[5], letters[6])]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in letters[:3]])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def written(folder: Path, source, quantize=None) -> GgufFile:
    folder.mkdir()
    gguf_merged.write(folder, source, quantize)
    return GgufFile(folder / gguf_merged.FILE)


def values(file: GgufFile, name: str) -> np.ndarray:
    data, kind = file.read(name)
    return widen(data, DENSE_TYPES[kind])


@pytest.mark.parametrize("case", ARCHS)
def test_a_folder_becomes_the_file_that_converters_write(tmp_path, case):
    """Names, shapes, values and metadata, against the tests' own converter and base plus change from the definition."""
    base, arch = with_tokenizer(case, tmp_path / "base"), ARCHS[case]
    source = open_source(str(base / "adapter_init"), str(base), True)
    file = written(tmp_path / "out", source, "f32")
    assert gguf_merged.check_file(tmp_path / "out", source, "f32")[0].startswith("read back: the same model")
    theirs = GgufFile(write_case(base, tmp_path / "base.gguf", arch))
    config = json.loads((base / "config.json").read_text())
    changes = {}
    for module, change in source.effect.items():
        name = f"{module}.weight".removeprefix("model.").removeprefix("language_model.")
        changes |= dict(converted(name, change.delta(), arch, config.get("text_config", config)))
    assert set(file.tensors) == set(theirs.tensors) and changes
    for name in theirs.tensors:
        want = values(theirs, name) + (changes[name] if name in changes else np.float32(0))
        assert np.array_equal(values(file, name), want) or np.allclose(values(file, name), want, rtol=1e-6), name
    gemma = {"attention.scale", "attention.sliding_window_pattern"} if arch in ("gemma2", "gemma3") else set()
    gemma |= {"rope.freq_base"} if case == "gemma3" else set()  # too few layers to have a global one
    for key, value in theirs.metadata.items():
        if key.split(".", 1)[1] not in LEFT_OUT | gemma:
            assert np.allclose(file.metadata[key], value) if not isinstance(value, str) else file.metadata[key] == value
    kinds = {key: kind for key, kind in file.kinds.items() if kind[1] is not None}
    assert kinds["tokenizer.ggml.token_type"][1] == gguf.GGUFValueType.INT32  # llama.cpp refuses uint32
    assert all(theirs.kinds[key] == kind for key, kind in kinds.items() if key in theirs.kinds)
    again = Tokenizer.from_gguf(file)
    assert again.encode("x <unk></s>", True) == source.checkpoint.tokenizer().encode("x <unk></s>", True)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"])
def test_matrices_get_the_type_that_is_asked_for(tmp_path, kind):
    """Rows of whole blocks as the gguf library quantizes them; other rows become f16; vectors stay float32."""
    base = with_tokenizer("llama_dense", tmp_path / "base")
    source = open_source(str(base / "adapter_init"), str(base), True)
    exact, file = written(tmp_path / "exact", source, "f32"), written(tmp_path / "out", source, kind)
    gguf_merged.check_file(tmp_path / "out", source, kind)
    seen = set()
    for name, info in file.tensors.items():
        want = values(exact, name)
        wanted = "F32" if want.ndim == 1 else kind.upper() if kind[0] != "q" or want.shape[1] % 32 == 0 else "F16"
        assert info.type == wanted, name
        got = file.raw(name)
        assert got.tobytes() == quants.quantize(want, gguf.GGMLQuantizationType[wanted]).tobytes(), name
        seen.add(wanted)
    assert kind.upper() in seen or kind[0] == "q"


def test_f16_is_the_merged_folder_value_by_value(tmp_path):
    base = with_tokenizer("llama_dense", tmp_path / "base")
    weights = SafetensorsFile(base / "model.safetensors")
    halves = {n: widen(weights.read(n), DENSE_TYPES[e.dtype]).astype(np.float16) for n, e in weights.entries.items()}
    safetensors.numpy.save_file(halves, base / "model.safetensors", {"format": "pt"})
    source = open_source(str(base / "adapter_init"), str(base), True)
    checkpoint = GgufCheckpoint(written(tmp_path / "gguf", source).path, "merged")
    stored = dict(merged.merged_tensors(source))
    for name in checkpoint.keys():
        assert np.array_equal(checkpoint.dense(name).float32(), stored[name].float32()), name


@pytest.mark.parametrize("case", ["llama_q4_k_m", "llama_q8_0"])
def test_a_gguf_base_keeps_what_the_adapter_does_not_change(tmp_path, case):
    """Metadata with its types, the tokenizer and unchanged tensors byte by byte; changed K-quants become q8_0."""
    base = GOLDEN / case / "model.gguf"
    source = open_source(str(GOLDEN / case / "adapter_init"), str(base), True)
    theirs, file = GgufFile(base), written(tmp_path / "out", source)
    note, _ = gguf_merged.check_file(tmp_path / "out", source, None)
    assert "the same model" in note and list(file.tensors) == list(theirs.tensors)
    for key in set(theirs.metadata) - {"general.file_type"}:
        assert str(file.metadata[key]) == str(theirs.metadata[key]) and file.kinds[key] == theirs.kinds[key], key
    changed = 0
    for name, info in theirs.tensors.items():
        if file.tensors[name].type == info.type and file.raw(name).tobytes() == theirs.raw(name).tobytes():
            continue
        changed += 1
        assert file.tensors[name].type == "Q8_0" and name.startswith("blk.")
    assert changed == len(source.effect)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_file_with_another_value_fails_its_check(tmp_path, kind):
    """A value that is off by a fifth of the largest in its row, in a matrix and in a vector."""
    base = with_tokenizer("llama_dense", tmp_path / "base")
    source = open_source(str(base / "adapter_init"), str(base), True)
    file = written(tmp_path / "out", source, kind)
    content = bytearray(file.path.read_bytes())
    for name in ("blk.0.attn_q.weight", "output_norm.weight"):
        info, changed = file.tensors[name], values(file, name).copy()
        changed[0] += np.abs(changed[0]).max() / 5
        stored = quants.quantize(changed, gguf.GGMLQuantizationType[info.type]).tobytes()
        file.path.write_bytes(content[: info.offset] + stored + content[info.offset + info.nbytes :])
        with pytest.raises(CheckFailed, match=f"{name} is not base plus change, rounded"):
            gguf_merged.check_file(tmp_path / "out", source, kind)
    file.path.write_bytes(content)
    gguf_merged.check_file(tmp_path / "out", source, kind)


def test_what_cannot_be_merged_is_refused_by_name(tmp_path, capsys):
    case = GOLDEN / "bitnet_packed"
    args = ["--adapter", str(case / "adapter_init"), "--model", str(case), "--to", "gguf", "--merged", "--out"]
    assert command.main([*args, str(tmp_path / "x.gguf")]) == 2
    err = capsys.readouterr().err
    assert "is ternary, so an adapter cannot be merged into it" in err and not list(tmp_path.iterdir())
    base = with_tokenizer("granite4_nope", tmp_path / "nope")
    source = open_source(str(base / "adapter_init"), str(base), True)
    written(tmp_path / "out", source)
    with pytest.raises(CheckFailed, match="GGUF has no way to describe"):
        gguf_merged.check_file(tmp_path / "out", source, None)
    (base / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer.json"):
        written(tmp_path / "out2", source)


def test_the_command_writes_one_file_and_checks_it(tmp_path, capsys):
    base = with_tokenizer("llama_dense", tmp_path / "base")
    args = ["--adapter", str(base / "adapter_init"), "--model", str(base), "--to", "gguf", "--merged"]
    assert command.main([*args, "--quantize", "f32", "--out", str(tmp_path / "m.gguf")]) == 0
    out = capsys.readouterr().out
    assert "wrote merged gguf: " in out and str(tmp_path / "m.gguf") in out and "the same model" in out
    for wrong in (["--quantize", "q8_0"], ["--merged", "--to", "peft"]):
        rest = [*args[:4], "--to", "gguf", *wrong, "--out", str(tmp_path / "n.gguf")]
        assert command.main(rest) == 2
