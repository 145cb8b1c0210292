"""BitNet as GGUF: the model of its folder in every type and layout, and what is never guessed."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from bitnet_gguf import CASE, write_bitnet
from test_gguf import add_tensor

from lorawgpu import cli, load
from lorawgpu.engine import readings
from lorawgpu.engine.readings import clear, settled
from lorawgpu.errors import UserError
from lorawgpu.files.gguf import GgufFile
from lorawgpu.weights.i2_s import read_i2_s
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.options import I2_S_LAYOUT
from lorawgpu.weights.tensors import Ternary

Q = gguf.GGMLQuantizationType
RELU2 = {"hidden_act": "relu2"}


def assert_the_case(checkpoint):
    base = open_checkpoint(CASE)
    eps = base.config.rms_norm_eps  # GGUF has it in float32
    assert checkpoint.config.rms_norm_eps == pytest.approx(eps, rel=1e-7)
    assert replace(checkpoint.config, rms_norm_eps=eps) == base.config
    for name in base.keys():
        ours, wanted = checkpoint.matrix(name), base.matrix(name)
        assert checkpoint.store(name) == ("ternary" if isinstance(wanted, Ternary) else "f32")
        if isinstance(wanted, Ternary):
            np.testing.assert_array_equal(ours.packed, wanted.packed)
            assert (ours.out, ours.scale) == (wanted.out, wanted.scale)
        else:
            np.testing.assert_array_equal(ours.float32(), wanted.float32())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arch": "bitnet-b1.58", "layout": "x86"}, {"i2_s_layout": "x86"}),
        ({"arch": "bitnet-25", "layout": "arm"}, {"i2_s_layout": "arm"}),
        ({"arch": "bitnet", "layout": "x86_rows"}, {"i2_s_layout": "x86_rows"} | RELU2),
        ({"arch": "bitnet", "hidden_act": "relu2"}, {"i2_s_layout": "x86"}),
        ({"arch": "bitnet", "hidden_activation": "relu2", "own_scales": True}, {"i2_s_layout": "x86"}),
    ],
)
def test_the_model_of_its_folder(tmp_path, options, said):
    assert_the_case(open_checkpoint(write_bitnet(tmp_path / "m.gguf", **options), said))


def test_the_user_overrides_the_activation(tmp_path):
    path = write_bitnet(tmp_path / "m.gguf", arch="bitnet", hidden_act="relu2")
    acts = [open_checkpoint(model, {"hidden_act": "silu"}).config.layers[0].mlp.act for model in (path, CASE)]
    assert acts == ["silu", "silu"]


@pytest.mark.parametrize("kind", [Q.TQ1_0, Q.TQ2_0, Q.F16])
def test_blocks_of_one_scale_and_scales_of_their_own(tmp_path, kind):
    """A layer of arch bitnet: rows of q and k keep their order."""
    writer, rng, made = gguf.GGUFWriter(tmp_path / "m.gguf", "bitnet"), np.random.default_rng(0), {}
    for key, value in {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 256,
                       "attention.head_count": 4}.items():  # fmt: skip
        writer.add_uint32(f"bitnet.{key}", value)
    writer.add_float32("bitnet.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("bitnet.hidden_act", "silu")
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        made[part] = rng.integers(-1, 2, (256, 256)).astype(np.float32)
        add_tensor(writer, f"blk.0.{part}.weight", made[part] / 2, kind)
        if part != "ffn_up":
            writer.add_tensor(f"blk.0.{part}.scale", np.array([0.3], np.float32))
    shapes = {f"blk.0.{n}": 256 for n in ("attn_norm", "ffn_norm", "attn_sub_norm", "ffn_sub_norm")}
    for name, shape in (shapes | {"token_embd": (32, 256), "output_norm": 256}).items():
        add_tensor(writer, f"{name}.weight", np.ones(shape, np.float32), Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert (checkpoint.config.layers[0].mlp.act, checkpoint.config.ternary) == ("silu", "multiply")
    for part, name in (("attn_q", "self_attn.q_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")):
        matrix = checkpoint.matrix(f"model.layers.0.{name}.weight")
        np.testing.assert_array_equal(matrix.values(), made[part])
        assert matrix.scale == (0.5 if part == "ffn_up" else float(np.float32(0.5) * np.float32(0.3)))


def test_a_run_keeps_what_was_said_for_its_adapter(tmp_path, runs, capsys):
    from tiny_run import write_config, write_data

    path = write_bitnet(tmp_path / "m.gguf", arch="bitnet", layout="arm")
    said = {"hidden_act": "relu2", "i2_s_layout": "arm"}
    folder = runs.train(write_config(tmp_path, base_model=str(path), max_steps=2, overrides_of_model_config=said))
    data = write_data(tmp_path / "v.jsonl", samples=2)
    losses = []
    for model, options in ((path, []), (path, ["--model-option", "hidden_act=silu"]), (CASE, [])):
        capsys.readouterr()
        argv = ["evaluate", "--model", model, "--adapter", folder, "--data", data, *options]
        assert cli.main(list(map(str, argv))) == 0
        losses.append(capsys.readouterr().out)
    assert losses[0] == losses[2] != losses[1]  # the folder has no i2_s: that it was said is no mistake
    assert cli.main(["export", "--adapter", str(folder), "--to", "gguf", "--out", str(tmp_path / "a.gguf")]) == 0
    assert GgufFile(tmp_path / "a.gguf").metadata["general.architecture"] == "bitnet"


DAMAGE = {
    "x86": [
        ({"edit": lambda t, scale: (np.full_like(t, 2), scale)}, "has codes that are not ternary; the file is damaged"),
        ({"edit": lambda t, scale: (t, np.nan)}, "its scale is nan; wanted a positive number"),
        ({"own_scales": True, "own": np.inf}, "q_proj.scale is inf; the file is damaged"),
    ],
    None: [({}, "q_proj.weight is of type i2_s, whose layout the file does not say; say it with --model-option i2_s_")],
}


@pytest.mark.parametrize(
    ("layout", "options", "words"), [(layout, *case) for layout, cases in DAMAGE.items() for case in cases]
)
def test_what_cannot_be_read(tmp_path, layout, options, words):
    checkpoint = open_checkpoint(write_bitnet(tmp_path / "m.gguf", **options), {I2_S_LAYOUT: layout} if layout else {})
    with pytest.raises(UserError) as error:
        checkpoint.matrix("model.layers.0.self_attn.q_proj.weight")
    assert words in str(error.value)


@pytest.mark.parametrize(("layout", "shape"), [("x86", (3, 32)), ("arm", (3, 32)), ("x86_rows", (6, 32))])
def test_a_matrix_that_no_file_of_the_layout_can_hold(layout, shape):
    with pytest.raises(UserError, match=rf"m: {shape[0]} x 32 weights cannot be stored as i2_s in the layout {layout}"):
        read_i2_s(np.zeros(256, np.uint8), shape, layout, "m")


def test_other_tensors_of_i2_s_are_refused(tmp_path):
    file = GgufFile(write_bitnet(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match="is of type i2_s, which is supported for linear layers only"):
        file.read("blk.0.ffn_up.weight")


def test_options_of_the_python_api():
    with pytest.raises(UserError, match="model_options: hidden_act is 'gelu'; wanted relu2 or silu"):
        load(CASE, model_options={"hidden_act": "gelu"})


LOSSES = [
    ((1.5, 12.0, 11.0), "x86"), ((12.0, 11.0, 2.0), "arm"), ((1.5, 8.0, 12.0), None), ((5.5, 5.6, 12.0), None),
    ((7.0, 12.0, 12.0), None), ((12.0, 12.0, 12.0), None), ((1.5, float("nan"), 12.0), None),
]  # fmt: skip


@pytest.mark.parametrize(("losses", "wanted"), LOSSES)
def test_only_a_clear_reading_is_taken(losses, wanted):
    assert clear(dict(zip(("x86", "x86_rows", "arm"), losses, strict=True))) == wanted


class Numbers:
    """A tokenizer for which the text is the tokens 3, 4, 5, .."""

    def encode(self, text, add_special):
        return list(range(3, 3 + len(text.split())))


def test_losses_are_those_of_the_readings(tmp_path, device, monkeypatch, capsys):
    """The loss of each layout is computed on the device; random weights know no text, so the file is refused."""
    path = write_bitnet(tmp_path / "m.gguf", layout="arm")
    checkpoint = open_checkpoint(path)
    monkeypatch.setattr(type(checkpoint), "tokenizer", lambda self: Numbers())
    found = {}
    of = readings.loss_of
    monkeypatch.setattr(
        readings, "loss_of", lambda device, c, ids: found.setdefault(c.options[I2_S_LAYOUT], of(device, c, ids))
    )
    with pytest.raises(
        UserError, match=r"does not tell; say it with --model-option i2_s_layout=VALUE.*x86, x86_rows or"
    ):
        settled(device, checkpoint)
    ids = np.arange(3, 3 + len(readings.TEXT.split()), dtype=np.int32)
    assert found["arm"] == of(device, open_checkpoint(CASE), ids) and len(set(found.values())) == 3
    monkeypatch.setattr(readings, "loss_of", lambda device, c, ids: 1.0 if c.options[I2_S_LAYOUT] == "arm" else 12.0)
    assert_the_case(settled(device, checkpoint))
    assert "read in the layout arm" in capsys.readouterr().err
