"""`lorawgpu verify CASE_DIR...`: loss, logits, gradients, optimizer steps and greedy text against golden cases."""

import json
import sys

import numpy as np

from lorawgpu.cli import add_device_option, main_of, parser_of
from lorawgpu.data.batching import bucket, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.errors import CheckFailed
from lorawgpu.generate.decoder import Decoder
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.optim.adamw import AdamW
from lorawgpu.verify.cases import STEPS, Case, Result, choose_cases, read_case
from lorawgpu.verify.compare import judge
from lorawgpu.weights.device_model import load_model

COLUMNS = {
    "loss": "loss_abs_err",
    "logits": "logits_rel",
    "gradient": "grad_rel_max",
    "norms": "grad_norm_rel_max",
    "steps": "step_loss_abs_err",
    "update": "after3_rel_max",
}


def optimizer_of(settings: dict) -> AdamW:
    """AdamW as case.json's `adamw` says; its defaults for a case without optimizer steps."""
    if not settings:
        return AdamW()
    beta1, beta2 = settings["betas"]
    return AdamW(beta1, beta2, settings["eps"], settings["weight_decay"], settings["max_grad_norm"] or 0.0)


def tokens_to_decode(case: Case, kind: str) -> tuple[np.ndarray, int]:
    """Prompt and expected continuation of `kind`, and the length of the prompt."""
    prompt, text = case.expected[f"{kind}_prompt"], case.expected[kind]
    return np.concatenate([prompt, text]).astype(np.int32), len(prompt)


def logits_before(device, model, adapter, ids: np.ndarray, start: int, kernels: KernelCache) -> np.ndarray:
    """Logits [len(ids) - start, V] that choose each token from `start` on; decoded as `generate` does, `ids` being fed.

    adapter: the buffers of an engine, or None for the bare model.
    """
    decoder = Decoder(device, model, adapter, context=len(ids), kernels=kernels)
    decoder.start([ids[:start].tolist()])
    rows = [decoder.read_logits(1)[0]]
    for token in ids[start:-1].tolist():
        decoder.extend([[token]])
        rows.append(decoder.read_logits(1)[0])
    return np.array(rows)


def run_case(device, case: Case, kernels: KernelCache | None = None, **options) -> Result:
    """Compute on `device` all that a case expects; `options` go to engine.Options."""
    model = load_model(device, case.checkpoint)
    greedy = {kind: tokens_to_decode(case, kind) for kind in ("greedy", "base_greedy") if kind in case.expected}
    tokens, longest = sum(len(s) for s in case.samples), max(len(s) for s in case.samples)
    options = Options(bucket(tokens), longest, **options)
    layout = AdapterLayout(case.lora, case.checkpoint.config)
    adamw = case.settings.get("adamw") or {}
    engine = Engine(device, model, options, layout, case.tensors, optimizer_of(adamw), kernels)
    batch, result = flatten(case.samples, bucket(tokens)), Result()
    if case.has("loss", "grad.", "grad_norm."):
        engine.begin()
        engine.accumulate(batch)
        result.loss = engine.loss_sum() / batch.targets
        result.grads = {name: g / batch.targets for name, g in engine.tensors("grads").items()}
    if case.has("logits"):
        result.logits = engine.logits(batch, np.arange(tokens))
    if case.has("step_losses", "grad_norms", "after3.", "greedy"):
        result.step_losses, result.grad_norms = take_steps(engine, batch, adamw["lr"])
        result.after3 = engine.tensors()
    for kind, (ids, start) in greedy.items():
        adapter = engine.adapter if kind == "greedy" else None
        setattr(result, kind, logits_before(device, model, adapter, ids, start, engine.kernels))
    return result


def take_steps(engine: Engine, batch, lr: float) -> tuple[list, list]:
    """The losses and gradient norms of optimizer steps on one batch."""
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        engine.step([batch], step, lr)
        losses.append(engine.loss_sum() / batch.targets)
        norms.append(engine.grad_norm())
    return losses, norms


def table_row(row: dict) -> str:
    """One case as a line under the header of COLUMNS; "-" where a case says nothing."""
    cells = ["-" if row[key] is None else f"{row[key]:.1e}" for key in COLUMNS.values()]
    greedy = {None: "-", True: "equal", False: "differs"}[row["greedy_match"]]
    return _line(row["case"], cells, greedy, "ok" if row["ok"] else "NOT OK")


def _line(name, cells, greedy, verdict) -> str:
    return f"{name:<20}" + "".join(f"{c:>10}" for c in cells) + f"{greedy:>9}  {verdict}"


def run(argv: list[str]):
    parser = parser_of("verify")
    parser.add_argument("cases", nargs="+", metavar="CASE_DIR", help="a golden case directory")
    parser.add_argument("--model", metavar="M", help="the model of cases that hold none: a folder, a .gguf, a hub name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line and case")
    add_device_option(parser)
    args = parser.parse_args(argv)
    folders, others = choose_cases(args.cases)
    for path in others:
        print(f"{path}: skipped, no golden case (it holds no case.json)", file=sys.stderr)
    cases = [read_case(folder, args.model) for folder in folders]
    device = open_device(args.device)
    print(f"{device.name}: {device.reason}", file=sys.stderr)
    kernels, faults = KernelCache(device), []
    if not args.json:
        print(_line("case", COLUMNS, "greedy", ""))
    for case in cases:
        row, wrong = judge(case, run_case(device, case, kernels))
        print(json.dumps(row) if args.json else table_row(row), flush=True)
        faults += [f"{case.name}: {fault}" for fault in wrong]
    if faults:
        raise CheckFailed("\n  ".join(["not ok:", *faults]))


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
