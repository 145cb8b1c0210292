"""The peer of bench_train.py: transformers + PEFT on CUDA, with the same config, adapter and batch."""

import gc
import time

import numpy as np

from lorawgpu.bench.turns import group_of

WARM_STEPS = 3
DROPPED = ("model_type", "quantization_config", "architectures", "torch_dtype")  # dense weights, in a dtype of ours


class OutOfMemory(Exception):
    """The peer does not fit on the GPU."""


class Peer:
    """A model of random weights under PEFT, trained as its users do. `data`: the contents of a config.json.

    peak_gib: the most memory of its tensors in its first steps. OutOfMemory if they do not fit.
    """

    def __init__(self, data: dict, targets, *, dtype: str, rank: int, tokens: int, seq: int, checkpointing: bool):
        import torch

        self.torch, self.group = torch, 1
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            self.model = self._build(data, getattr(torch, dtype), checkpointing, rank, targets)
            self.parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
            vocab = self.model.config.vocab_size
            self.ids = torch.randint(3, vocab, (tokens // seq, seq), device="cuda")
            for _ in range(WARM_STEPS):
                self._step()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            self.close()
            raise OutOfMemory(str(error).split(". ")[0]) from None
        self.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30

    def _build(self, data, dtype, checkpointing, rank, targets):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        text = data.get("text_config", data)
        settings = {key: value for key, value in text.items() if key not in DROPPED}
        config = AutoConfig.for_model(text["model_type"], **settings)
        self.torch.set_default_dtype(dtype)
        try:
            with self.torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(config)  # with the attention that transformers chooses
        finally:
            self.torch.set_default_dtype(self.torch.float32)
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets)))
        return model.train()

    def _step(self):
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, seconds: float) -> float:
        """Median seconds per step over about `seconds`."""
        times, until = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            begin = time.perf_counter()
            for _ in range(self.group):
                self._step()
            self.torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / self.group)
            self.group = group_of(times[-1])
        return float(np.median(times))

    def close(self):
        """Free its memory."""
        self.model = self.optimizer = self.parameters = self.ids = None
        gc.collect()
        self.torch.cuda.empty_cache()
