"""Exports that go wrong: found before they are announced, refused with a reason, and leaving nothing behind."""

from dataclasses import replace

import numpy as np
import pytest
from exports import BITNET_CASE, DENSE, adapter_of, export

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export import __main__ as command
from lorawgpu.export import gguf, mlx, peft
from lorawgpu.export.effect import WeightChange, check_effect, difference, effect_of
from lorawgpu.export.staging import staged
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import write_adapter


@pytest.mark.parametrize("form", [peft, mlx, gguf], ids=lambda form: form.RUNTIME)
@pytest.mark.parametrize("fault", ["negated", "scale", "swapped", "missing", "rows"])
def test_a_wrong_export_is_found(tmp_path, capsys, monkeypatch, form, fault):
    read = form.read

    def wrong(folder, source):
        effect = dict(read(folder, source))
        q, k = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
        change = effect[q]
        if fault == "negated":
            effect[q] = replace(change, b=-change.b)
        if fault == "scale":
            effect[q] = replace(change, scale=change.scale * (1 + 1e-5))
        if fault == "swapped":
            effect[q], effect[k] = effect[k], effect[q]
        if fault == "missing":
            del effect[q]
        if fault == "rows":
            effect[q] = replace(change, b=gguf.permute(change.b, 4))
        return effect

    monkeypatch.setattr(form, "read", wrong)
    to = next(name for name, module in command.FORMATS.items() if module is form)
    adapter, out = adapter_of(tmp_path / "a", DENSE), tmp_path / "new" / "deep" / "out"
    assert export("--adapter", adapter, "--to", to, "--model", DENSE, "--out", out) == 1
    assert "self_attn.q_proj" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_and_an_interrupt_leave_nothing(tmp_path, monkeypatch, capsys):
    adapter = adapter_of(tmp_path / "a", DENSE)
    for error, code in ((OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)):

        def failing(handle, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", failing)
            assert export("--adapter", adapter, "--to", "mlx", "--out", tmp_path / "new" / "m") == code
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_names_the_path(tmp_path, monkeypatch, capsys):
    """Neither numpy's short write nor Python's failed write names the file."""
    adapter = adapter_of(tmp_path / "a", DENSE)
    for error in (OSError("2048 requested and 32 written"), OSError(28, "No space left on device")):

        def failing(self, error=error):
            raise error

        monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", failing)
        assert export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g") == 2
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'g'}: No space left on ")
        assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("size", [1000, 4096])
def test_a_file_that_may_not_grow(tmp_path, capsys, size):
    """As on a full disk, in two places: where Python writes, and where numpy does, which misses errors at the end."""
    resource = pytest.importorskip("resource")
    adapter = adapter_of(tmp_path / "a", DENSE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code = export("--adapter", adapter, "--to", "gguf", "--out", tmp_path / "g")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert code == 2 and err.startswith(f"error: {tmp_path / 'g'}: ") and ("No space" in err or "too large" in err), err


def test_nothing_is_overwritten(tmp_path, capsys):
    adapter, out = adapter_of(tmp_path / "a", DENSE), tmp_path / "out"
    out.mkdir()
    assert export("--adapter", adapter, "--to", "peft", "--out", out) == 0  # an empty folder may be replaced
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert export("--adapter", adapter, "--to", "mlx", "--out", out) == 2
    assert f"{out}: already exists; remove it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(UserError, match="already exists"), staged(adapter / "adapter_config.json"):
        pass


def test_an_adapter_on_the_head_is_refused(tmp_path, capsys):
    write_adapter(tmp_path / "a", LoraConfig(2, 4, ("lm_head",)), {
        "base_model.model.lm_head.lora_A.weight": np.ones((2, 64), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.ones((320, 2), np.float32),
    }, "base")  # fmt: skip
    for more in ([], ["--model", DENSE]):
        assert export("--adapter", tmp_path / "a", "--to", "mlx", "--out", tmp_path / "m", *more) == 2
        assert "lm_head" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_remarks_on_bitnet_for_mlx_and_on_uncommon_settings_for_peft(tmp_path, capsys):
    argv = ["--adapter", BITNET_CASE / "adapter_init", "--model", BITNET_CASE]
    assert export(*argv, "--to", "mlx", "--out", tmp_path / "m") == 0
    assert "Can't convert layer of type BitLinear to LoRA" in capsys.readouterr().out
    adapter = adapter_of(tmp_path / "a", DENSE)
    assert export("--adapter", adapter, "--to", "peft", "--out", tmp_path / "p") == 0
    assert "use_rslora, rank_pattern, alpha_pattern: PEFT applies them" in capsys.readouterr().out


def test_difference_equals_the_difference_of_whole_matrices():
    rng = np.random.default_rng(0)
    ours, theirs = (
        WeightChange(
            rng.standard_normal((r, 33)).astype(np.float32), rng.standard_normal((57, r)).astype(np.float32), s
        )
        for r, s in ((4, 2.0), (7, 0.5))
    )
    want = np.linalg.norm(theirs.delta() - ours.delta()) / np.linalg.norm(ours.delta())
    assert difference(ours, theirs) == pytest.approx(want, rel=1e-5)  # float32 products
    assert difference(ours, replace(ours, b=ours.b * 4, scale=0.5)) < 1e-15
    assert difference(ours, replace(theirs, b=theirs.b * np.nan)) == np.inf
    zero = replace(ours, b=ours.b * 0)
    assert difference(zero, zero) == 0 and difference(zero, ours) > 1
    with pytest.raises(CheckFailed, match="m is in only one of"):
        check_effect({"m": ours}, {}, "x")


def test_modules_that_are_not_linear_layers():
    with pytest.raises(UserError, match="model.layers.0.self_attn.rotary"):
        effect_of(LoraConfig(1, 1, ("x",)), {"base_model.model.model.layers.0.self_attn.rotary.lora_A.weight": None})
