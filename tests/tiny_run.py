"""Whole training runs on the smallest golden model, in this process, with the session's device and kernels."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
import yaml
from golden_case import GOLDEN

from lorawgpu.config.load import load_config
from lorawgpu.train import __main__ as command
from lorawgpu.train import job
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.placement import build_engine
from lorawgpu.train.resume import check_same_run, load_snapshot, today_of
from lorawgpu.train.run_dir import checkpoint_to_resume
from lorawgpu.train.setup import prepare
from lorawgpu.train.trainer import Trainer

MODEL = GOLDEN / "llama_dense"
VOCABULARY = 150  # that the smallest golden models share


def write_data(path: Path, samples=8, seed=0, longest=20) -> Path:
    """Random pre-tokenised samples, the first two tokens of each without a label."""
    random = np.random.default_rng(seed)
    with open(path, "w") as file:
        for _ in range(samples):
            ids = random.integers(3, VOCABULARY, random.integers(6, longest)).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": [-100, -100, *ids[2:]]}) + "\n")
    return path


def write_config(folder: Path, **keys) -> Path:
    """A config of a run in `folder`/out on random data; `keys` replace or add to it, None removes."""
    folder.mkdir(parents=True, exist_ok=True)
    if "datasets" not in keys:
        keys["datasets"] = [{"path": str(write_data(folder / "data.jsonl"))}]
    defaults = {
        "base_model": str(MODEL),
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "cache"),
        "lora_r": 4,
        "lora_alpha": 8,
        "learning_rate": 1e-2,
        "micro_batch_size": 2,
        "sequence_len": 32,
        "max_steps": 6,
        "logging_steps": 1,
    }
    config = {key: value for key, value in (defaults | keys).items() if value is not None}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def shared_main(monkeypatch, device, kernels):
    """The `train` command's main on the session's device, with its kernels compiled already."""
    monkeypatch.setattr(job, "open_device", lambda *_, **__: device)
    monkeypatch.setattr(job, "build_engine", partial(build_engine, kernels=kernels))
    return command.main


def byte_model(folder: Path) -> Path:
    """The model with a tokenizer of single bytes."""
    shutil.copytree(MODEL, folder)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([], trainer)
    backend.save(str(folder / "tokenizer.json"))
    return folder


class Runs:
    """Starts runs that share a device and its compiled kernels."""

    def __init__(self, device, kernels):
        self.device, self.kernels = device, kernels

    def trainer(self, config: Path, resume: str | None = None, kind=Trainer, exchange=None) -> Trainer:
        """As the command does it, up to the first step."""
        loaded = load_config(config)
        path = checkpoint_to_resume(Path(loaded.output_dir), resume)
        snapshot = load_snapshot(path) if path else None
        ranks = exchange.size if exchange else 1
        run = prepare(loaded, today=today_of(snapshot) if snapshot else None, ranks=ranks)
        if snapshot:
            check_same_run(run, snapshot, path)
        return kind(run, build_engine(run, self.device, self.kernels, exchange), snapshot)

    def train(self, config: Path, resume: str | None = None, kind=Trainer) -> Path:
        """A run to its end; the run folder."""
        trainer = self.trainer(config, resume, kind)
        assert trainer.train() == 0
        return trainer.run.folder


def adapter_bytes(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def losses(folder: Path) -> list[float]:
    """The logged training losses."""
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "learning_rate" in r]
