"""Makes golden cases (tests/golden/README.md) with transformers and PEFT in float64. Needs the extra `reference`.

    python scripts/make_golden.py yarn_qwen2 --out tests/golden      # one of scripts/golden_recipes.py, or several
    python scripts/make_golden.py --check tests/golden/qwen2         # compute an existing case again and compare

No code of this project takes part. Each sequence of a batch runs on its own, so nothing depends on its padding.
"""

import argparse
import json
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ADAMW = {"lr": 0.002, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
STEPS, PROMPT, ANSWER = 3, 8, 12
LOSS = "mean cross-entropy over target tokens (label != -100), logits[t] predicts labels[t+1]"


@dataclass(frozen=True)
class Recipe:
    """config: of config.json. targets: PEFT's target_modules. lengths: tokens of each sequence of the batch. options:
    others of PEFT's LoraConfig."""

    config: dict
    targets: list | str
    lengths: tuple[int, ...] = (27, 19)
    r: int = 2
    options: dict = field(default_factory=dict)


@contextmanager
def float64():
    """Inside, every float32 that a model asks for by name is float64: RoPE's tables, norms, the softmax."""
    kept = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept[:3]
        torch.set_default_dtype(kept[3])


def model_class(folder: Path):
    return getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])


def load_model(folder: Path, dtype):
    """The model in `folder`. Call it inside of `float64()` for float64."""
    return model_class(folder).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def random_weights(model, seed: int) -> None:
    """Give every tensor values that matter: no gradient vanishes, no activation explodes."""
    random = torch.Generator().manual_seed(seed)
    plus_one = any("Gemma2" in type(m).__name__ or "Gemma3" in type(m).__name__ for m in model.modules())
    for name, tensor in model.state_dict().items():
        shape = tensor.shape
        if "norm" in name and name.endswith("weight"):
            values = torch.rand(shape, generator=random) + (-0.5 if plus_one else 0.5)
        elif name.endswith("layer_scalar"):
            values = 0.7 + 0.5 * torch.rand(shape, generator=random)
        elif name.endswith("bias"):
            values = 0.3 * torch.randn(shape, generator=random)
        else:
            scale = 0.6 if "embed" in name else 1.2 * shape[-1] ** -0.5
            values = scale * torch.randn(shape, generator=random)
        tensor.copy_(values.bfloat16())


def write_model(folder: Path, config: dict, seed: int) -> None:
    """`config.json` as given, and random bf16 weights under the names of published checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    settings = transformers.AutoConfig.from_pretrained(folder)
    with torch.no_grad():
        model = model_class(folder)._from_config(settings, dtype=torch.float32)
        random_weights(model, seed)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def write_batch(folder: Path, lengths, vocab: int, seed: int) -> None:
    """Random ids padded on the right. The first third of a sequence carries no loss, as a prompt would."""
    random, width = np.random.default_rng(seed), max(lengths)
    ids, labels = np.zeros((len(lengths), width), np.int32), np.full((len(lengths), width), -100, np.int32)
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int32)
    for row, length in enumerate(lengths):
        ids[row, :length] = random.integers(3, vocab, length)
        labels[row, length // 3 : length] = ids[row, length // 3 : length]
    np.savez_compressed(folder / "batch.npz", input_ids=ids, labels=labels, attention_mask=mask)


def write_adapter(folder: Path, recipe: Recipe, seed: int) -> None:
    """A PEFT adapter whose B is not zero, so that every gradient is alive."""
    settings = {"r": recipe.r, "lora_alpha": 2 * recipe.r, "target_modules": recipe.targets, **recipe.options}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(load_model(folder, torch.float32), lora)
    model.save_pretrained(folder / "adapter_init", save_embedding_layers=False)
    (folder / "adapter_init" / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_init" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": None}
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()  # PEFT writes a set
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    file, random = folder / "adapter_init" / "adapter_model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in sorted(tensors):
        shape = tensors[name].shape
        tensors[name] = 0.5 * shape[1] ** -0.5 * torch.randn(shape, generator=random)
    save_file(tensors, file, {"format": "pt"})


def losses_of(model, batch) -> tuple[torch.Tensor, list]:
    """The mean loss over the target tokens of all sequences, and the logits [length, V] of each."""
    total, count, logits = 0.0, 0, []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        out = model(input_ids=torch.tensor(ids[None, :length], dtype=torch.long), use_cache=False).logits[0]
        target = torch.tensor(labels[1:length], dtype=torch.long)
        total = total + torch.nn.functional.cross_entropy(out[:-1], target, ignore_index=-100, reduction="sum")
        count += int((target != -100).sum())
        logits.append(out)
    return total / count, logits


def greedy(model, prompt) -> tuple[list, list]:
    """The most likely ANSWER tokens after `prompt`, without a cache, and the margin of each."""
    ids, gaps = [int(i) for i in prompt], []
    for _ in range(ANSWER):
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], gaps


def saved_name(name: str) -> str:
    """A parameter's name in the file of an adapter: without that of the adapter."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")


def compute(folder: Path, dtype, prompt) -> dict:
    """Everything that expected.npz holds, computed in float64 or float32."""
    batch, given = np.load(folder / "batch.npz"), load_file(folder / "adapter_init" / "adapter_model.safetensors")
    lora = peft.LoraConfig.from_pretrained(folder / "adapter_init")
    lora.inference_mode = False
    with float64() if dtype == torch.float64 else nullcontext():
        model = peft.get_peft_model(load_model(folder, dtype), lora, autocast_adapter_dtype=False)
        parameters = {saved_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        if parameters.keys() != given.keys():
            raise SystemExit(f"{folder}: adapter_init does not fit: {parameters.keys() ^ given.keys()}")
        for name, parameter in parameters.items():
            parameter.data = given[name].to(dtype)
        settings = json.loads((folder / "case.json").read_text())["adamw"]
        options = {"lr": settings["lr"], "betas": tuple(settings["betas"]), "eps": settings["eps"]}
        adamw = torch.optim.AdamW(parameters.values(), weight_decay=settings["weight_decay"], **options)
        result, losses, norms = {}, [], []
        for step in range(STEPS):
            adamw.zero_grad()
            loss, logits = losses_of(model, batch)
            loss.backward()
            if step == 0:
                result = {"loss": loss.item(), "logits": padded(logits, batch["input_ids"].shape[1])}
                result |= {f"grad.{name}": p.grad.numpy().copy() for name, p in parameters.items()}
            norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), settings["max_grad_norm"]).item())
            losses.append(loss.item())
            adamw.step()
        result |= {"step_losses": losses, "grad_norms": norms}
        result |= {f"after3.{name}": p.detach().numpy().copy() for name, p in parameters.items()}
        with torch.no_grad():
            result["greedy"], result["greedy_gap"] = greedy(model, prompt)
        return {name: np.asarray(value) for name, value in (result | {"greedy_prompt": prompt}).items()}


def padded(logits: list, width: int) -> np.ndarray:
    """[sequences, width, V], with zeros after the end of a sequence."""
    rows = [np.pad(row.detach().numpy(), ((0, width - len(row)), (0, 0))) for row in logits]
    return np.stack(rows)


def drifts(folder: Path, got: dict, expected: dict) -> dict:
    """How far one result is from another, by quantity, as the comparison of golden cases measures it."""
    start = load_file(folder / "adapter_init" / "adapter_model.safetensors")
    mask = np.load(folder / "batch.npz")["attention_mask"].astype(bool)

    def relative(a, b):
        return float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b))

    steps = {name: start[name].numpy().astype(np.float64) for name in start}
    return {
        "loss": float(abs(got["loss"] - expected["loss"])),
        "logits": relative(got["logits"][mask], expected["logits"][mask]),
        "grad": max(relative(got[f"grad.{n}"], expected[f"grad.{n}"]) for n in steps),
        "step_losses": float(np.abs(got["step_losses"] - expected["step_losses"]).max()),
        "after3": max(relative(got[f"after3.{n}"] - s, expected[f"after3.{n}"] - s) for n, s in steps.items()),
    }


def stored(name: str, value: np.ndarray) -> np.ndarray:
    if name in ("greedy", "greedy_prompt"):
        return value.astype(np.int32)
    return value.astype(np.float32) if name == "logits" or name.startswith(("grad.", "after3.")) else value


def make(name: str, recipe: Recipe, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    seed = sum(name.encode())
    write_model(folder, recipe.config, seed)
    vocab = recipe.config.get("text_config", recipe.config)["vocab_size"]
    write_batch(folder, recipe.lengths, vocab, seed)
    write_adapter(folder, recipe, seed)
    lora = {"r": recipe.r, "alpha": 2 * recipe.r, "targets": recipe.targets, "rslora": False}
    case = {"family": name, "store": "dense", "lora": lora, "adamw": ADAMW, "loss": LOSS}
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    prompt = np.random.default_rng(seed + 1).integers(3, vocab, PROMPT)
    exact = compute(folder, torch.float64, prompt)
    case["float32_vs_float64"] = drifts(folder, compute(folder, torch.float32, prompt), exact)
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    np.savez_compressed(folder / "expected.npz", **{key: stored(key, value) for key, value in exact.items()})
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{name}: loss {exact['loss']:.3f}, smallest margin {exact['greedy_gap'].min():.3g}, {size:,} bytes")


def check(folder: Path) -> None:
    """Print how far a new computation of a case is from its expected.npz."""
    expected = dict(np.load(folder / "expected.npz"))
    got = compute(folder, torch.float64, expected["greedy_prompt"])
    same = np.array_equal(got["greedy"], expected["greedy"])
    errors = " ".join(f"{key} {value:.1e}" for key, value in drifts(folder, got, expected).items())
    print(f"{folder.name}: {errors} greedy {'equal' if same else 'differs'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="recipes, or with --check the folders of cases")
    parser.add_argument("--out", type=Path, default=Path("tests/golden"), help="a folder for each case goes here")
    parser.add_argument("--check", action="store_true", help="compute the cases again and print how far they are off")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in args.names:
        if args.check:
            check(Path(name))
        else:
            from golden_recipes import RECIPES

            make(name, RECIPES[name], args.out / name)


if __name__ == "__main__":
    main()
