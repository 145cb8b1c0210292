"""The report of a run: its content, escaping, when it is written, and how it looks in a browser."""

import builtins
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from golden_case import GOLDEN
from tiny_model import random_adapter
from tiny_run import MODEL, byte_model, write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.report import __main__ as report
from lorawgpu.report import page
from lorawgpu.report.__main__ import write_report
from lorawgpu.report.adapter import product_norm, read_change
from lorawgpu.report.charts import line_chart
from lorawgpu.report.record import read_run
from lorawgpu.train.metrics import MetricsLog, read_metrics
from lorawgpu.weights.loader import open_checkpoint

CHARTS = ("loss", "perplexity", "learning-rate", "grad-norm", "speed", "memory", "adapter")
HOSTILE = "<script>alert('x')</script> & \"quoted\""


def whole_run(folder, train_main):
    """Train with everything that a report shows; returns the run folder."""
    model = byte_model(folder / "model")
    held_out = write_data(folder / "held_out.jsonl", samples=3, seed=9)
    config = write_config(folder, base_model=str(model), eval_steps=2, max_steps=6, sample_prompts=[HOSTILE, "ab"],
                          test_datasets=[{"path": str(held_out)}])  # fmt: skip
    assert train_main([str(config)]) == 0
    return folder / "out"


def charts_in(html: str) -> dict[str, str]:
    """The figures with a drawing, by id."""
    figures = re.findall(r'<figure id="chart-([\w-]+)">(.*?)</figure>', html, re.S)
    return {name: body for name, body in figures if "<svg" in body}


def test_a_run_ends_with_a_report_of_everything(tmp_path, train_main, capsys):
    folder = whole_run(tmp_path, train_main)
    assert f"report: {folder}/report.html" in capsys.readouterr().out
    html = (folder / "report.html").read_text("utf-8")
    assert tuple(charts_in(html)) == CHARTS
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)[^"')\s]*//""", html.replace("xlink:", ""))
    assert "finished at step 6 of 6" in html and "trainable parameters" in html
    assert "lora_r: 4" in html and "sequence_len: 32" in html  # the resolved config
    assert "<script" not in html and "&lt;script&gt;" in html
    with_base = [r for r in read_metrics(folder / "metrics.jsonl") if "base_samples" in r]
    assert [r["step"] for r in with_base] == [0] and "2 earlier" in html
    lines = html.count("base model</div>")
    assert lines == 2 and html.count("with the adapter, step 6") == 2


def test_evaluating_the_base_before_the_first_step_leaves_no_trace(tmp_path, runs):
    """When continuing from an adapter, what is measured before the first step is that adapter."""
    keys = {
        "adapter": str(MODEL / "adapter_init"),
        "lora_r": None,
        "lora_alpha": None,
        "val_set_size": 2,
        "max_steps": 2,
    }
    without = runs.trainer(write_config(tmp_path / "a", **keys))
    without.evaluates = False
    assert without.train() == 0
    looked = runs.trainer(write_config(tmp_path / "b", **keys))
    assert looked.train() == 0
    for name, tensor in without.engine.tensors().items():
        assert np.array_equal(tensor, looked.engine.tensors()[name]), name
    records = read_metrics(looked.run.folder / "metrics.jsonl")
    (base,) = [r["base_eval_loss"] for r in records if "base_eval_loss" in r]
    looked.engine.load("params", looked.run.start)
    from lorawgpu.engine.evaluation import evaluate_source

    assert evaluate_source(looked.engine, looked.run.data.validation).loss == base


def test_a_copy_of_a_finished_run_is_finished(tmp_path, runs):
    """The times of a copy's files are in any order; a run that was made longer has its new total."""
    folder = runs.train(write_config(tmp_path, max_steps=1))
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    assert "finished at step 1 of 1" in page.page([read_run(folder)])
    runs.train(write_config(tmp_path, max_steps=2), "auto")
    assert "finished at step 2 of 2" in page.page([read_run(folder)])


def test_a_running_run_is_reported_up_to_its_last_record(tmp_path):
    """An incomplete last line, no config, no checkpoint: no error, and nothing is changed."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(0, plan={"model": "m"}, total_steps=9)
    log.write(1, loss=2.0, learning_rate=1e-3)
    log.close()
    torn = (tmp_path / "metrics.jsonl").read_bytes() + b'{"step": 2, "loss": 1.'
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    assert report.main([str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text("utf-8")
    assert "step 1 of 9; running or interrupted" in html and "No adapter has been saved yet." in html
    assert tuple(charts_in(html)) == ("loss", "learning-rate")
    assert (tmp_path / "metrics.jsonl").read_bytes() == torn


@pytest.mark.parametrize(
    "config", [b"base_model: caf\xe9\n", b"\0\0", b"\xff\xfe" * 9, b"adapter: 2024-99-99\n", b"[" * 5000, b"? [1]\n"]
)
def test_a_damaged_config_is_shown_as_far_as_it_can_be_read(tmp_path, config):
    (tmp_path / "config.yaml").write_bytes(config)
    assert report.main([str(tmp_path)]) == 0
    assert "No adapter has been saved yet." in (tmp_path / "report.html").read_text("utf-8")


HOSTILE_RECORDS = {
    "huge numbers": b'{"step": 1, "loss": 1e308, "seconds": 1e300, "tokens": '
    + b"9" * 400
    + b', "gpu_bytes": -1e308}\n',
    "huge steps": b'{"step": ' + b"9" * 30 + b', "loss": 1}\n{"step": -5, "loss": 2}\n{"step": true, "loss": 3}\n',
    "infinities": b'{"step": 1, "loss": Infinity, "seconds": Infinity, "tokens": NaN, "tokens_per_s": -Infinity}\n',
    "half surrogates": b'{"step": 1, "samples": [{"prompt": "\\ud800", "text": "\\udfff"}], "bad_step": "\\ud800"}\n',
    "bad steps": b"".join(b'{"step": %d, "bad_step": "x", "loss": 1}\n' % n for n in range(20_000)),
    "deep": b"[" * 100_000 + b"\n",
    "long": b'{"step": 1, "samples": [{"prompt": "' + b"a" * 3_000_000 + b'", "text": "b"}]}\n',
}


@pytest.mark.parametrize("kind", HOSTILE_RECORDS)
def test_hostile_records_make_a_page_of_bounded_size(tmp_path, kind):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "total_steps": 9}\n' + HOSTILE_RECORDS[kind])
    assert len(write_report(tmp_path).read_bytes()) < 3_000_000


@pytest.mark.parametrize(
    "config",
    [b'adapter: !!bool "maybe"\n', b"adapter: !!timestamp x\n", b"adapter: !!python/name:os.x\n", b"adapter: a\0\n",
     b"a: &a [x]\nadapter: *a\n", b"adapter: lora\n", b"x: 1\n" * 2_000_000],
)  # fmt: skip
def test_hostile_configs_are_shown(tmp_path, config):
    (tmp_path / "config.yaml").write_bytes(config)
    assert len(write_report(tmp_path).read_bytes()) < 1_000_000


def test_files_that_are_no_runs_files_are_refused(tmp_path, capsys):
    """A FIFO blocks whoever opens it, and other people's lines are no records."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "config.yaml")
    assert report.main([str(tmp_path)]) == 2 and "holds no run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_bytes(b"x\n" * 100_000)
    assert report.main([str(tmp_path)]) == 2 and "1,000 of its lines are no records" in capsys.readouterr().err


def test_records_of_any_kind_make_a_page(tmp_path):
    """Non-finite numbers leave a gap; values that are not numbers, or not lists of samples, are ignored."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, loss=float("nan"), plan=[HOSTILE], samples="x", base_samples=[3], total_steps=HOSTILE, gpu_bytes=True)
    log.write(2, loss=HOSTILE, bad_step=HOSTILE, grad_norm=0.0, tokens_per_s=0, samples=[{"prompt": HOSTILE}])
    log.write(3, loss=0.0, grad_norm=-1e300)
    log.close()
    html = write_report(tmp_path).read_text("utf-8")
    assert "<script" not in html and "1 steps were not finite" in html
    assert "loss" in charts_in(html)


def test_a_resumed_run_shows_its_latest_checkpoint(tmp_path, train_main):
    config = write_config(tmp_path, max_steps=2, save_steps=2)
    assert train_main([str(config)]) == 0
    folder = tmp_path / "out"
    assert read_run(folder).finished
    lora, tensors = read_adapter(folder)
    write_adapter(folder / "checkpoint-3", lora, {n: 2 * t for n, t in tensors.items()}, "m")
    later = (folder / "adapter_model.safetensors").stat().st_mtime + 10
    os.utime(folder / "checkpoint-3" / "adapter_model.safetensors", (later, later))
    run = read_run(folder)
    assert not run.finished and run.adapter.place.name == "checkpoint-3"
    (folder / "checkpoint-3" / "adapter_model.safetensors").write_bytes(b"cut")
    assert read_run(folder).adapter.place.name == "checkpoint-2"


def test_change_is_the_norm_of_the_difference_of_products(tmp_path):
    """Against the products themselves, in float64; from a fresh start, and from another adapter."""
    lora, start = read_adapter(MODEL / "adapter_init")
    rng = np.random.default_rng(0)
    moved = {name: tensor + rng.standard_normal(tensor.shape).astype(np.float32) for name, tensor in start.items()}
    write_adapter(tmp_path / "a", lora, moved, "m")
    module = "model.layers.1.mlp.down_proj"
    a, b = (f"base_model.model.{module}.lora_{x}.weight" for x in "AB")
    product = lora.scale(module) * moved[b].astype(np.float64) @ moved[a]
    before = lora.scale(module) * start[b].astype(np.float64) @ start[a]
    fresh, continued = read_change(tmp_path / "a", None), read_change(tmp_path / "a", MODEL / "adapter_init")
    assert fresh.change[1]["down_proj"] == pytest.approx(np.linalg.norm(product), rel=1e-6)  # float32 tensors
    assert continued.change[1]["down_proj"] == pytest.approx(np.linalg.norm(product - before), rel=1e-6)
    assert continued.continued and not fresh.continued
    assert fresh.parameters == sum(t.size for t in start.values())
    zero = read_change(MODEL / "adapter_init", MODEL / "adapter_init")
    assert max(v for layer in zero.change.values() for v in layer.values()) < 1e-6
    assert product_norm(np.zeros((2, 3)), np.ones((4, 2))) == 0


def test_every_linear_layer_of_a_family_has_a_change(tmp_path):
    """Those of per-layer inputs too, which lie in the layer itself."""
    model = GOLDEN / "gemma4"
    lora = LoraConfig(2, 4, ("q_proj", *PER_LAYER_MODULES))
    write_adapter(tmp_path, lora, random_adapter(lora, open_checkpoint(model).config), "base")
    change = read_change(tmp_path, None)
    assert change.modules == ["q_proj", *PER_LAYER_MODULES]
    assert all(set(layer) == set(change.modules) and min(layer.values()) > 0 for layer in change.change.values())


def test_charts_are_the_same_every_time():
    line = [("", "#000", [(1, 2.0), (2, 1.0)])]
    one, two = (line_chart("x", "t", line) for _ in range(2))
    assert one.svg == two.svg and one.svg != line_chart("y", "t", line).svg and one.summary == "from 2 to 1"


def two_runs(tmp_path) -> list[Path]:
    """Runs of 4 steps whose records are known: the second learns faster, and was resumed once."""
    folders = []
    for name, rate in (("first", 0.5), ("second", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"lora_r: 4\nlearning_rate: {rate}\ndatasets:\n- path: a.jsonl\n")
        log = MetricsLog(folder / "metrics.jsonl")
        log.write(0, total_steps=4, plan={"model": "m"}, started="2026-03-04T10:00:00+00:00")
        log.write(0, base_eval_loss=3.0)
        for step in (1, 2):
            log.write(step, loss=3.0 - rate * step, learning_rate=1e-4, tokens=100 * step, seconds=2.0 * step,
                      tokens_per_s=50.0, paused_seconds=10.0)  # fmt: skip
        log.write(2, eval_loss=math.log(5))
        if name == "second":  # another process: its counters begin at 0
            log.write(2, started="2026-03-05T10:00:00+00:00")
            log.write(4, loss=0.5, learning_rate=0, tokens=300, seconds=4.0, tokens_per_s=75.0, paused_seconds=6.0)
        log.close()
        folders.append(folder)
    return folders


def test_figures_of_a_run_that_was_resumed_count_all_of_it(tmp_path):
    """200 tokens in 4 s, then 300 in 4 s: 62.5 a second; 10 s and 6 s were spent on other things."""
    facts = dict(page.facts(read_run(two_runs(tmp_path)[1])))
    assert facts["Tokens"] == "500" and facts["Training time"] == "0:00:08" and facts["Tokens/s"] == "62"
    assert facts["Started"] == "2026-03-04 10:00" and facts["Wall time"] == "0:00:24"
    assert facts["Perplexity (held out)"] == "20.086 → 5.000 (-75%)"  # e^3 before


def test_values_are_shown_on_hover_without_a_script(tmp_path):
    html = write_report(two_runs(tmp_path)[0]).read_text("utf-8")
    charts = charts_in(html)
    titles = re.findall(r"<title>(.*?)</title></rect>", charts["loss"], re.S)
    assert titles == ["step 0\nheld out: 3", "step 1\ntraining: 2.5", "step 2\ntraining: 2\nheld out: 1.6094"]
    assert re.findall(r"<title>(.*?)</title></rect>", charts["perplexity"], re.S) == ["step 0\n20.086", "step 2\n5"]
    assert "<script" not in html and 'aria-label="Loss: training from 2.5 to 2; held out from 3 to 1.609"' in html


def test_hover_names_the_step_under_the_pointer():
    """The strips cover the axes, and each holds the x of its own step."""
    series = [(step, 1.0 * step) for step in (0, 1, 5, 10)]
    svg = line_chart("x", "t", [("", "#000", series)]).svg
    found = re.findall(r'"hover"><rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)".*?<line x1="([\d.]+)"', svg, re.S)
    spans = [tuple(map(float, group)) for group in found]
    assert len(spans) == 4 and all(x <= at <= x + width for x, width, at in spans)
    assert all(abs(a[0] + a[1] - b[0]) < 0.2 for a, b in zip(spans, spans[1:], strict=False))
    steps = [at for _, _, at in spans]
    scale = (steps[3] - steps[0]) / 10
    assert steps == pytest.approx([steps[0] + scale * step for step in (0, 1, 5, 10)], abs=0.1)
    # the drawn line has the same coordinates: matplotlib writes its points as M x y L x y ...
    assert re.search(rf"M {steps[0]:.0f}\.?\d* ", svg)
    many = line_chart("x", "t", [("", "#000", [(step, 1.0) for step in range(10_000)])]).svg
    assert many.count('class="hover"') <= 300


def test_two_runs_side_by_side(tmp_path, capsys):
    first, second = two_runs(tmp_path)
    assert report.main([str(first), str(second)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == first / "report-second.html" and not (first / "report.html").exists()
    html = path.read_text("utf-8")
    assert tuple(charts_in(html)) == tuple(
        f"{run}-{name}" for run in "ab" for name in ("loss", "perplexity", "learning-rate", "speed")
    )
    rows = re.findall(r"<tr><th>(\w+)</th><td>(.*?)</td><td>(.*?)</td></tr>", html.split('id="differences"')[1])
    assert rows[0] == ("learning_rate", "0.5", "1.0") and "lora_r" not in [row[0] for row in rows]
    ids = re.findall(r' id="(chart-[^"]+)"', html)
    assert len(ids) == len(set(ids))
    # the same axes: both have steps up to 4 and losses from 0.5 to 3
    axes = [re.findall(r"<!-- (\S+) -->", charts_in(html)[f"{run}-loss"]) for run in "ab"]
    assert [t for t in axes[0] if t not in ("training", "held", "base")] == [
        t for t in axes[1] if t not in ("training", "held", "base")
    ]
    assert report.main([str(first), str(tmp_path / "none")]) == 2 and "none: no such folder" in capsys.readouterr().err


def without_matplotlib(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_matplotlib_the_command_names_it_and_training_goes_on(tmp_path, monkeypatch, train_main, capsys):
    without_matplotlib(monkeypatch)
    assert train_main([str(write_config(tmp_path, max_steps=1))]) == 0
    assert "note: no report: the report's charts need matplotlib" in capsys.readouterr().err
    assert report.main([str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "pip install matplotlib" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["no folder", "no run"])
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, make):
    make(tmp_path / "none")
    assert report.main([str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


# report_to


class Library(types.ModuleType):
    """A stand-in for tensorboard.summary and wandb that records its calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def Writer(self, logdir):  # noqa: N802
        self.calls.append(("open", logdir))
        return self

    def init(self, **settings):
        self.calls.append(("init", settings))
        return self

    def add_scalar(self, name, value, step):
        self.calls.append((name, value, step))

    def log(self, numbers, step):
        self.calls.append((numbers, step))

    def flush(self):
        pass

    def close(self):
        self.calls.append("closed")

    finish = close


def test_numbers_go_to_tensorboard_and_wandb(tmp_path, monkeypatch, runs):
    board, wandb = Library("tensorboard.summary"), Library("wandb")
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = runs.train(write_config(tmp_path, max_steps=2, report_to=["tensorboard", "wandb"]))
    logged = [r for r in read_metrics(folder / "metrics.jsonl") if "learning_rate" in r]
    assert board.calls[0] == ("open", str(folder / "tensorboard")) and board.calls[-1] == "closed"
    assert [t for t in board.calls if t[0] == "loss"] == [("loss", r["loss"], r["step"]) for r in logged]
    settings = wandb.calls[0][1]
    assert settings["name"] == "out" and settings["config"]["lora_r"] == 4 and wandb.calls[-1] == "closed"
    sent = [t for t in wandb.calls if isinstance(t, tuple) and isinstance(t[0], dict) and "loss" in t[0]]
    assert [(n["loss"], step) for n, step in sent] == [(r["loss"], r["step"]) for r in logged]
    assert not any("plan" in n for n, _ in sent)


def test_a_number_that_is_not_finite_is_left_out(tmp_path):
    from lorawgpu.train.loggers import TensorBoard

    board = Library("tensorboard.summary")
    TensorBoard(board, tmp_path, {}).write(3, {"loss": float("nan"), "lr": 1.0})
    assert board.calls[1:] == [("lr", 1.0, 3)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_is_reported_before_anything_is_loaded(tmp_path, monkeypatch, train_main, capsys, name):
    for module in (name, "tensorboard.summary"):
        monkeypatch.setitem(sys.modules, module, None)
    assert train_main([str(write_config(tmp_path, report_to=name))]) == 2
    assert f"pip install {name}" in capsys.readouterr().err
    assert load_config(tmp_path / "config.yaml").report_to == [name]


# In a browser

CHROMIUM = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --hide-scrollbars --window-size=1240,1700").split()  # fmt: skip
MEASURE = """<script>
const shown = [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.closest("figure").id, box.width, box.height, svg.querySelectorAll("path").length];
});
const boxes = [document.documentElement, ...document.querySelectorAll("figure, .card")];
const wide = Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth));
const fetched = performance.getEntriesByType("resource").length;
document.body.dataset.measured = JSON.stringify({shown, wide, fetched});
</script></body>"""


def browser() -> str:
    """Chromium. Only a developer's machine may do without: a missing one is a failure where CI is set."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        assert not os.environ.get("CI"), "no chromium (Debian: apt-get install chromium)"
        pytest.skip("no chromium (Debian: apt-get install chromium)")
    return found


@pytest.mark.long
def test_a_browser_shows_every_chart(tmp_path, train_main):
    """A script that is inserted into a copy of the page measures it; the page itself has no script."""
    html = (whole_run(tmp_path, train_main) / "report.html").read_text("utf-8")
    (tmp_path / "measured.html").write_text(html.replace("</body>", MEASURE))
    command = [browser(), *CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}"]
    page = f"file://{tmp_path}/measured.html"
    dom = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True).stdout
    measured = json.loads(re.search(r'data-measured="([^"]*)"', dom)[1].replace("&quot;", '"'))
    assert [name for name, *_ in measured["shown"]] == [f"chart-{name}" for name in CHARTS]
    for name, width, height, paths in measured["shown"]:
        assert width > 250 and height > 120 and paths > 5, name
    assert measured["wide"] <= 0 and measured["fetched"] == 0
    shot = tmp_path / "report.png"
    subprocess.run([*command, f"--screenshot={shot}", page], capture_output=True, timeout=120, check=True)
    assert_drawn(shot)


def assert_drawn(png):
    """The screenshot has the colors of the page, of the lines and of the held-out line, so it is not blank."""
    from matplotlib.image import imread

    pixels = (imread(png)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (1700, 1240)
    for color in ((0x25, 0x63, 0xA8), (0xD9, 0x76, 0x2B), (0xFF, 0xFF, 0xFF)):
        assert (np.abs(pixels - color).max(-1) < 8).sum() > 50, color
