"""The judge of golden cases, with results made up and on the device; the command, its lines and its exit codes."""

import contextlib
import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from golden_case import GOLDEN, SMALL_CASES, reference_model

from lorawgpu import verify
from lorawgpu.data.batching import Sample, flatten
from lorawgpu.errors import UserError
from lorawgpu.golden import QUANTITIES, Result, compare, judge, read_case
from lorawgpu.reference.model import model_forward

KEYS = (
    "case, loss_abs_err, logits_rel, grad_rel_max, grad_worst, grad_norm_rel_max, step_loss_abs_err, after3_rel_max, "
    "greedy_match, tolerance, ok"
).split(", ")


@pytest.fixture(params=SMALL_CASES)
def any_case(request):
    return read_case(GOLDEN / request.param)


@pytest.fixture
def case():
    return read_case(GOLDEN / "bitnet_q_only")


def perfect(case) -> Result:
    """What an exact computation would give."""
    x = case.expected
    grads = {n: g.astype(np.float64) for n, g in case.part("grad").items()}
    greedy = np.zeros((len(x["greedy"]), case.checkpoint.config.vocab_size))
    greedy[np.arange(len(greedy)), x["greedy"]] = 1.0
    return Result(
        loss=float(x["loss"]),
        logits=x["logits"][case.mask].astype(np.float64),
        grads=grads,
        step_losses=list(x["step_losses"]),
        grad_norms=list(x["grad_norms"]),
        after3=case.part("after3"),
        greedy=greedy,
    )


def with_settings(case, **changes):
    return replace(case, settings=case.settings | changes)


# Judging


def test_a_perfect_result_is_ok(any_case):
    row, faults = judge(any_case, perfect(any_case))
    assert list(row) == KEYS
    assert row["ok"] and not faults and row["greedy_match"] is True and row["case"] == any_case.name
    assert max(row[key] for key in KEYS[1:8] if key != "grad_worst") == 0.0
    drift = any_case.settings["float32_vs_float64"]
    assert row["tolerance"] == {
        name: max(1e-4, 5 * drift.get(name, 0.0))
        for name in ("loss", "logits", "grad", "grad_norm", "step_losses", "after3")
    }
    json.dumps(row, allow_nan=False)


def spoil(case, result, what, size):
    """Move one quantity by `size`, in the sense in which it is judged."""
    if what in ("loss_abs_err", "step_loss_abs_err"):
        result.loss += size if what == "loss_abs_err" else 0.0
        result.step_losses[1] -= size if what == "step_loss_abs_err" else 0.0
    elif what == "logits_rel":
        result.logits[3, 5] += size * np.linalg.norm(result.logits)
    elif what == "grad_rel_max":
        result.grads[SPOILT] = result.grads[SPOILT] * (1 + size)
    elif what == "grad_norm_rel_max":
        result.grad_norms[2] *= 1 - size
    elif what == "after3_rel_max":
        start = case.tensors[SPOILT].astype(np.float64)
        result.after3[SPOILT] = start + (result.after3[SPOILT] - start) * (1 + size)


SPOILT = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
PHASES = {
    "loss_abs_err": "loss",
    "logits_rel": "loss",
    "grad_rel_max": "loss",
    "grad_norm_rel_max": "steps",
    "step_loss_abs_err": "steps",
    "after3_rel_max": "steps",
}


@pytest.mark.parametrize("what", PHASES)
def test_each_quantity_is_judged_at_its_tolerance(case, what):
    for size, ok in ((0.9e-4, True), (1.2e-4, False), (np.nan, False)):
        result = perfect(case)
        spoil(case, result, what, size)
        row, faults = judge(case, result)
        assert row["ok"] == ok == (not faults), size
        assert all(what in fault for fault in faults)
        json.dumps(row, allow_nan=False)
        if size == size:
            assert row[what] == pytest.approx(size, rel=1e-6)
            assert row["grad_worst"] == (SPOILT if what == "grad_rel_max" else row["grad_worst"])


@pytest.mark.parametrize("what", PHASES)
def test_five_times_the_drift_is_allowed(case, what):
    case = with_settings(case, float32_vs_float64={QUANTITIES[what]: 1e-3})
    for size, ok in ((4.9e-3, True), (5.2e-3, False)):
        result = perfect(case)
        spoil(case, result, what, size)
        assert judge(case, result)[0]["ok"] == ok, size


@pytest.mark.parametrize("what", PHASES)
def test_a_rounding_near_a_tie_loosens_its_own_phase(case, what):
    result = perfect(case)
    spoil(case, result, what, 4e-2)
    for phase in ("loss", "steps", "greedy"):
        close = with_settings(case, rounding_margin={"loss": 1e-5, "steps": 1e-5, "greedy": 1e-5} | {phase: 2.9e-6})
        assert judge(close, result)[0]["ok"] == (phase == PHASES[what]), phase
    spoil(case, result, what, 2e-2)
    assert not judge(with_settings(case, rounding_margin=dict.fromkeys(("loss", "steps", "greedy"), 1e-7)), result)[0][
        "ok"
    ]


def test_the_worst_tensor_is_named(case):
    result = perfect(case)
    for i, name in enumerate(result.grads):
        result.grads[name] = result.grads[name] * (1 + 1e-5 * (i + 1))
    assert judge(case, result)[0]["grad_worst"] == list(result.grads)[-1]
    result.grads[name := next(iter(result.grads))][0, 0] = np.nan
    assert judge(case, result)[0]["grad_worst"] == name


def test_norms_of_single_tensors_count_with_the_steps(case):
    norms = {f"grad_norm.{n}": np.linalg.norm(g) for n, g in case.part("grad").items()}
    case = replace(case, expected=case.expected | norms)
    result = perfect(case)
    assert judge(case, result)[0]["ok"]
    result.grads[SPOILT] = result.grads[SPOILT] * 1.01
    row, faults = judge(case, result)
    assert row["grad_norm_rel_max"] == pytest.approx(0.01, rel=1e-4) and any(
        "grad_norm" in f and SPOILT in f for f in faults
    )
    assert [c.key for c in compare(case, result)].count("grad_norm_rel_max") == 2


def choose(result, index, token):
    result.greedy[index] = 0.0
    result.greedy[index, token] = 1.0


def test_greedy_choices(case):
    """Token 6 of this case has a margin of 0.08: it may differ only where a rounding may flip."""
    result = perfect(case)
    choose(result, 5, 61)
    row, faults = judge(case, result)
    assert row["greedy_match"] is False and "token 6 is 61, expected 157 (margin 0.08" in faults[0]
    assert judge(with_settings(case, rounding_margin={"greedy": 2e-6}), result)[0]["greedy_match"] is True
    gaps = case.expected["greedy_gap"].copy()
    gaps[5] = 9e-4
    close = replace(case, expected=case.expected | {"greedy_gap": gaps})
    assert judge(close, result)[0]["greedy_match"] is True
    choose(result, 7, 3)  # the comparison goes on behind it
    assert judge(close, result)[0]["greedy_match"] is False
    result.greedy[5] = np.nan
    assert judge(close, result)[0]["ok"] is False


def test_greedy_without_given_margins_is_judged_by_ours(case):
    case = replace(case, expected={k: v for k, v in case.expected.items() if k != "greedy_gap"})
    result = perfect(case)
    result.greedy[2, 7] = 1.0005
    assert judge(case, result)[0]["greedy_match"] is True
    result.greedy[2, 7] = 1.002
    assert judge(case, result)[0]["greedy_match"] is False


def test_base_greedy_decides_but_is_no_greedy(case):
    """A case with `base_greedy` alone prints null for `greedy_match`, as golden/README.md says; ok covers it."""
    x = {k: v for k, v in case.expected.items() if not k.startswith("greedy")}
    x |= {"base_greedy": case.expected["greedy"], "base_greedy_prompt": case.expected["greedy_prompt"]}
    case, result = replace(case, expected=x), perfect(case)
    result.greedy, result.base_greedy = None, result.greedy
    row, _ = judge(case, result)
    assert row["greedy_match"] is None and row["ok"]
    result.base_greedy[3, 1] = 9.0
    row, faults = judge(case, result)
    assert row["greedy_match"] is None and not row["ok"] and "base_greedy token 4" in faults[0]


@pytest.mark.parametrize("kept", ["loss", "logits", "grad", "step_losses", "grad_norms", "after3"])
def test_absent_parts_are_null(case, kept):
    x = {k: v for k, v in case.expected.items() if k.split(".")[0] == kept}
    row, _ = judge(replace(case, expected=x), perfect(case))
    assert list(row) == KEYS and row["ok"] and row["greedy_match"] is None
    assert sum(row[key] is not None for key in PHASES) == 1
    assert sum(value is not None for value in row["tolerance"].values()) == 1


# On the device


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
    """All small cases as JSON lines."""
    code, out, err = command("--json", *(GOLDEN / name for name in SMALL_CASES))
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("index", range(len(SMALL_CASES)), ids=SMALL_CASES)
def test_golden_cases(printed, index):
    code, rows, err = printed
    row = rows[index]
    assert list(row) == KEYS and row["case"] == SMALL_CASES[index]
    assert row["ok"] and row["greedy_match"], err
    assert row["grad_rel_max"] < 1e-5 and row["logits_rel"] < 1e-5  # float32 noise, far below what is tolerated
    assert code == (0 if all(row["ok"] for row in rows) else 1)


@pytest.mark.parametrize("options", [{"attention": "chain"}, {"checkpointing": True}])
def test_golden_cases_with_other_plans(device, kernels, any_case, options):
    result = verify.run_case(device, any_case, kernels, **options)
    row, faults = judge(any_case, result)
    # Chain adds its sums up in another order than flash. In llama_dense one gradient of 1e-6 beside a mean of 0.2 is
    # rounding noise, which Adam makes as large as the others: the update of its tensor is not compared there.
    noise = [f for f in faults if f.startswith("after3") and any_case.name == "llama_dense"]
    assert faults == noise and row["greedy_match"]


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
    """As smollm2's: no model, no steps, gradients of one tensor, norms of another, greedy text of the base."""
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
    """What the bare model writes, from the float64 reference."""
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
    "no model": (drop("config.json"), "holds no model .config.json.; give one with --model"),
    "no weights": (drop("model.safetensors"), "model.safetensors"),
    "no adapter": (lambda f: shutil.rmtree(f / "adapter_init"), "adapter_init: no such folder"),
    "no batch": (drop("batch.npz"), "batch.npz: no such file"),
    "no expectation": (drop("expected.npz"), "expected.npz: no such file"),
    "broken batch": (damage("batch.npz"), "batch.npz: no readable"),
    "broken expectation": (damage("expected.npz"), "expected.npz: no readable"),
    "broken JSON": (damage("case.json"), "case.json: not valid JSON"),
    "no labels": (change("batch.npz", labels=None), "labels is missing"),
    "shapes": (change("batch.npz", labels=lambda x: x[:, 1:]), r"wanted \[B, T\]"),
    "left padding": (change("batch.npz", attention_mask=lambda x: x * [0] + (np.arange(12) > 3)), "on the right"),
    "ids": (change("batch.npz", input_ids=lambda x: x + 100), "no token of a vocabulary of 160"),
    "no target": (change("batch.npz", labels=lambda x: x * 0 - 100), "no target token"),
    "logits": (change("expected.npz", logits=lambda x: x[..., :-1]), "logits has shape"),
    "steps": (change("expected.npz", step_losses=np.zeros(4)), r"step_losses has shape \(4,\); wanted \(3,\)"),
    "a tensor": (change("expected.npz", grad__x=np.zeros(3)), "grad.x: the adapter has no such tensor"),
    "no prompt": (change("expected.npz", greedy_prompt=None), "greedy without greedy_prompt"),
    "greedy ids": (change("expected.npz", greedy=lambda x: x + 160), "greedy is no list of tokens"),
    "no optimizer": (no_adamw, "adamw is missing"),
    "nothing": (lambda f: rewrite(f / "expected.npz", {"foo": np.zeros(1)}), "nothing that can be checked"),
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


def test_a_case_that_is_no_folder(capsys):
    assert verify.main(["nowhere"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_a_glob_over_cases_skips_what_is_none(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(verify, "run_case", lambda device, case, kernels: ran.append(case.name) or perfect(case))
    case, note, other = GOLDEN / "bitnet_q_only", tmp_path / "README.md", tmp_path / "texts"
    note.write_text("")
    other.mkdir()
    assert verify.main([str(case), str(note), str(other)]) == 0 and ran == ["bitnet_q_only"]
    err = capsys.readouterr().err
    assert f"{note}: skipped" in err and f"{other}: skipped, no golden case (it holds no case.json)" in err
    assert verify.main([str(case), str(tmp_path / "gone")]) == 2 and len(ran) == 1  # a name that was mistyped
    assert "gone: no such folder" in capsys.readouterr().err
    assert verify.main([str(note), str(other)]) == 2
