"""`lorawgpu verify`: golden cases on the device; the command, its lines and its exit codes."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest
from golden_case import GGUF_CASES, GOLDEN, SMALL_CASES, reference_model
from golden_results import KEYS, PHASES, perfect
from oplab import limited

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.errors import UserError
from lorawgpu.reference.model import model_forward
from lorawgpu.verify import __main__ as verify
from lorawgpu.verify.cases import read_case
from lorawgpu.verify.compare import judge

CASES = SMALL_CASES + GGUF_CASES


@pytest.fixture
def case():
    return read_case(GOLDEN / "bitnet_q_only")


@pytest.fixture(scope="module")
def command(device, kernels):
    """`lorawgpu verify` on the session's device, with its compiled kernels: (exit code, stdout, stderr)."""

    def run(*argv):
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(verify, "open_device", lambda choice: device)
            patch.setattr(verify, "KernelCache", lambda device: kernels)
            code = verify.main([str(a) for a in argv])
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="module")
def printed(command):
    """All cases as JSON lines."""
    code, out, err = command("--json", *(GOLDEN / name for name in CASES))
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_golden_cases(printed, index):
    code, rows, err = printed
    row = rows[index]
    assert list(row) == KEYS and row["case"] == CASES[index]
    assert row["ok"] and row["greedy_match"], err
    assert row["grad_rel_max"] < 1e-5 and row["logits_rel"] < 1e-5  # float32 noise, far below what is tolerated
    assert code == (0 if all(row["ok"] for row in rows) else 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{"attention": "chain"}, {"checkpointing": True}])
def test_golden_cases_with_other_plans(device, kernels, name, options):
    case = read_case(GOLDEN / name)
    result = verify.run_case(device, case, kernels, **options)
    row, faults = judge(case, result)
    # Chain adds in another order than flash. In llama_dense one gradient of 1e-6, next to a mean of 0.2, is rounding
    # noise that Adam makes as large as the others: the update of its tensor is not compared there.
    noise = [f for f in faults if f.startswith("after3") and case.name == "llama_dense"]
    assert faults == noise and row["greedy_match"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_golden_case_in_blocks_of_rows(device, kernels, checkpointing):
    """Bindings of 300 KiB take 192 of the case's 256 rows of gate and up."""
    case = read_case(GOLDEN / "llama_dense")
    result = verify.run_case(limited(device, 300 << 10), case, kernels, checkpointing=checkpointing)
    row, faults = judge(case, result)
    assert [f for f in faults if not f.startswith("after3")] == [] and row["greedy_match"]
    assert row["grad_rel_max"] < 1e-5 and row["logits_rel"] < 1e-5


def test_the_table_and_exit_code_of_a_wrong_case(tmp_path, command):
    folder = copy_case(tmp_path, "bitnet_q_only")
    arrays = dict(np.load(folder / "expected.npz"))
    rewrite(folder / "expected.npz", arrays | {"loss": arrays["loss"] + 1e-3})
    code, out, err = command(folder, GOLDEN / "bitnet_packed")
    lines = out.splitlines()
    assert (
        code == 1 and lines[1].startswith("bitnet_q_only") and lines[1].endswith("NOT OK") and lines[2].endswith(" ok")
    )
    assert "bitnet_q_only: loss_abs_err 0.001 exceeds 0.0001" in err and "device" in err


def test_a_case_of_parts_with_a_model_from_elsewhere(tmp_path, command):
    """Like smollm2's: no model, no steps, gradients of one tensor, norms of another, greedy text of the base model."""
    folder = copy_case(tmp_path, "bitnet_q_only")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    settings = json.loads((folder / "case.json").read_text())
    del settings["adamw"], settings["rounding_margin"], settings["float32_vs_float64"]
    (folder / "case.json").write_text(json.dumps(settings))
    arrays = dict(np.load(folder / "expected.npz"))
    first, second = sorted(k for k in arrays if k.startswith("grad."))[:2]
    case = read_case(GOLDEN / "bitnet_q_only")
    rewrite(
        folder / "expected.npz",
        {
            first: arrays[first],
            f"grad_norm.{second.removeprefix('grad.')}": np.linalg.norm(arrays[second]),
            "base_greedy_prompt": arrays["greedy_prompt"],
            "base_greedy": base_greedy(case, arrays["greedy_prompt"], 4),
        },
    )
    code, out, err = command("--json", folder, "--model", GOLDEN / "bitnet_q_only")
    row = json.loads(out)
    assert code == 0, err
    assert row["ok"] and row["grad_rel_max"] > 0 and row["grad_norm_rel_max"] is not None
    assert [k for k in PHASES if row[k] is None] == [
        "loss_abs_err",
        "logits_rel",
        "step_loss_abs_err",
        "after3_rel_max",
    ]


def base_greedy(case, prompt, count):
    """The greedy text of the base model, from the float64 reference."""
    model, ids = reference_model(case.checkpoint, {}, 1.0), prompt.tolist()
    for _ in range(count):
        sequence = np.array(ids, np.int32)
        ids.append(int(model_forward(model, flatten([Sample(sequence, sequence)], len(ids)))[0][-1].argmax()))
    return np.array(ids[len(prompt) :], np.int32)


# Wrong input


def copy_case(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    return folder


def rewrite(path, arrays):
    path.unlink()
    np.savez(path, **arrays)


def drop(name):
    return lambda folder: (folder / name).unlink()


def damage(name):
    return lambda folder: (folder / name).write_bytes(b"PK\x03\x04 no archive")


def change(file, **arrays):
    """Replace arrays of an .npz; None drops one, a function maps it."""

    def apply(folder):
        found = dict(np.load(folder / file))
        for name, value in arrays.items():
            name = name.replace("__", ".")
            found[name] = value(found[name]) if callable(value) else value
        rewrite(folder / file, {k: v for k, v in found.items() if v is not None})

    return apply


def no_adamw(folder):
    settings = json.loads((folder / "case.json").read_text())
    (folder / "case.json").write_text(json.dumps(settings | {"adamw": None}))


WRONG = {
    "no case.json": (drop("case.json"), "case.json: no such file"),
    "no model": (drop("config.json"), "has no model .config.json or model.gguf.; pass one with --model"),
    "no weights": (drop("model.safetensors"), "model.safetensors"),
    "no adapter": (lambda f: shutil.rmtree(f / "adapter_init"), "adapter_init: no such folder"),
    "no batch": (drop("batch.npz"), "batch.npz: no such file"),
    "no expectation": (drop("expected.npz"), "expected.npz: no such file"),
    "broken batch": (damage("batch.npz"), "batch.npz: not a readable"),
    "broken expectation": (damage("expected.npz"), "expected.npz: not a readable"),
    "broken JSON": (damage("case.json"), "case.json: not valid JSON"),
    "no labels": (change("batch.npz", labels=None), "labels is missing"),
    "shapes": (change("batch.npz", labels=lambda x: x[:, 1:]), r"wanted \[B, T\]"),
    "left padding": (change("batch.npz", attention_mask=lambda x: x * [0] + (np.arange(12) > 3)), "on the right"),
    "ids": (change("batch.npz", input_ids=lambda x: x + 100), "outside the vocabulary of 160"),
    "no target": (change("batch.npz", labels=lambda x: x * 0 - 100), "no target token"),
    "logits": (change("expected.npz", logits=lambda x: x[..., :-1]), "logits has shape"),
    "steps": (change("expected.npz", step_losses=np.zeros(4)), r"step_losses has shape \(4,\); wanted \(3,\)"),
    "a tensor": (change("expected.npz", grad__x=np.zeros(3)), "grad.x: the adapter has no such tensor"),
    "no prompt": (change("expected.npz", greedy_prompt=None), "greedy without greedy_prompt"),
    "greedy ids": (change("expected.npz", greedy=lambda x: x + 160), "greedy is not a list of token ids"),
    "no optimizer": (no_adamw, "adamw is missing"),
    "nothing": (lambda f: rewrite(f / "expected.npz", {"foo": np.zeros(1)}), "contains nothing to check"),
}


@pytest.mark.parametrize("fault, message", WRONG.values(), ids=WRONG)
def test_wrong_cases_are_refused_by_name(tmp_path, capsys, fault, message):
    folder = copy_case(tmp_path, "bitnet_q_only")
    fault(folder)
    with pytest.raises(UserError, match=message):
        read_case(folder)
    assert verify.main([str(GOLDEN / "bitnet_packed"), str(folder)]) == 2  # before anything is computed
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "bitnet_q_only" in err


def test_a_case_that_is_not_a_folder(capsys):
    assert verify.main(["nowhere"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_a_glob_over_cases_skips_everything_else(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(verify, "run_case", lambda device, case, kernels: ran.append(case.name) or perfect(case))
    case, note, other = GOLDEN / "bitnet_q_only", tmp_path / "README.md", tmp_path / "texts"
    note.write_text("")
    other.mkdir()
    assert verify.main([str(case), str(note), str(other)]) == 0 and ran == ["bitnet_q_only"]
    err = capsys.readouterr().err
    assert f"{note}: skipped" in err and f"{other}: skipped, not a golden case" in err
    assert verify.main([str(case), str(tmp_path / "gone")]) == 2 and len(ran) == 1  # a misspelled name
    assert "gone: no such folder" in capsys.readouterr().err
    assert verify.main([str(note), str(other)]) == 2
