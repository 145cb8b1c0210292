"""Mistakes in adapters and golden cases."""

import json
from functools import partial

import numpy as np

from . import DENSE, GOLDEN, change, copy_of, evaluate, tensors_of, write_tensors

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(folder, edit=None, **keys):
    """An adapter with some config keys changed, or its tensors: `edit(header, data)` returns the new ones."""
    made = copy_of(DENSE / "adapter_init", folder)
    change(made / "adapter_config.json", **keys)
    if edit:
        write_tensors(path := made / "adapter_model.safetensors", *edit(*tensors_of(path)))
    return evaluate(folder, adapter=made)


def entry(**keys):
    return lambda header, data: (header | {A: header[A] | keys}, data)


def renamed(name):
    return lambda header, data: ({name if key == A else key: value for key, value in header.items()}, data)


def without_last(header, data):
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    rest = {name: value for name, value in header.items() if name != last}
    return rest, data[: header[last]["data_offsets"][0]]


def infinite(header, data):
    at = header[A]["data_offsets"][0]
    return header, data[:at] + b"\0\0\x80\x7f" + data[at + 4 :]


def files(folder, edit):
    made = copy_of(DENSE / "adapter_init", folder)
    edit(made)
    return evaluate(folder, adapter=made)


def pickled(made):
    (made / "adapter_model.safetensors").rename(made / "adapter_model.bin")


def holding(name):
    """A folder with just this file, used as an adapter."""

    def build(folder):
        (folder / "other" / name).parent.mkdir(parents=True)
        (folder / "other" / name).touch()
        return evaluate(folder, adapter=folder / "other")

    return build


def in_gguf(folder):
    (folder / "adapter.gguf").touch()
    return evaluate(folder, adapter=folder / "adapter.gguf")


ADAPTERS = {
    "no name": (lambda t: [*evaluate(t), "--adapter", ""], "the adapter's name is empty"),
    "no folder": (lambda t: evaluate(t, adapter=t / "none"), "none: no such folder; wanted a PEFT adapter directory"),
    "for mlx-lm": (holding("adapters.safetensors"), "that is an mlx-lm adapter; use the PEFT folder"),
    "for llama.cpp": (holding("adapter.gguf"), "that is a GGUF adapter for llama.cpp; use the PEFT folder"),
    "a file for llama.cpp": (in_gguf, "that is a GGUF adapter for llama.cpp; use the PEFT folder"),
    "a model": (holding("config.json"), "a model, not an adapter"),
    "an unfinished run": (holding("checkpoint-9/adapter_model.safetensors"), "its newest checkpoint is "),
    "no weights": (partial(files, edit=lambda a: (a / "adapter_model.safetensors").unlink()), "adapter_model.safetens"),
    "a pickle": (partial(files, edit=pickled), "adapter_model.bin is a pickle, which can run code"),
    "no config": (partial(files, edit=lambda a: (a / "adapter_config.json").unlink()), "adapter_config.json: no such"),
    "of another base": (lambda t: evaluate(t, adapter=GOLDEN / "bitnet_packed/adapter_init"), "has shape"),
    "not a LoRA adapter": (partial(adapter, peft_type="IA3"), "peft_type is 'IA3'; only LORA adapters are supported"),
    "whole modules": (partial(adapter, modules_to_save=["score"]), "modules_to_save is ['score']: wanted a list of"),
    "trained biases": (partial(adapter, bias="all"), "bias is 'all'; trained biases are not supported"),
    "an unsupported initialization": (partial(adapter, init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    "an unknown setting": (partial(adapter, use_xlora=True), "'use_xlora' is True; this setting is not supported"),
    "a rank of 0": (partial(adapter, r=0), "r is 0; wanted a positive whole number"),
    "a rank of a word": (partial(adapter, r="four"), "r is 'four'; wanted a positive whole number"),
    "an alpha of infinity": (partial(adapter, lora_alpha=float("inf")), "lora_alpha is inf; wanted a positive number"),
    "a dropout of all": (partial(adapter, lora_dropout=1.0), "lora_dropout is 1.0; wanted a number from 0 to below 1"),
    "rsLoRA of a word": (partial(adapter, use_rslora="yes"), "use_rslora is 'yes'; wanted true or false"),
    "targets of a number": (partial(adapter, target_modules=7), "target_modules is 7; wanted a list of module names"),
    "no targets": (partial(adapter, target_modules=[]), "lora_target_modules is empty: nothing to train"),
    "too few targets": (partial(adapter, target_modules=["q_proj"]), "does not belong to a target module"),
    "targets that match nothing": (partial(adapter, target_modules=["layers.9.mlp.up_proj"]), "matches no linear"),
    "patterns of a list": (partial(adapter, rank_pattern=[1]), "rank_pattern is [1]; wanted an object of module patte"),
    "a pattern too complex": (partial(adapter, rank_pattern={"(.*)*x": 4}), "is too complex; use the module"),
    "an invalid pattern": (partial(adapter, alpha_pattern={"(q": 4}), "is not a valid regular expression"),
    "another rank": (partial(adapter, r=8), "has shape [4, 64]; wanted [8, 64]"),
    "no tensors": (partial(adapter, edit=lambda h, d: ({}, b"")), "contains no tensors"),
    "not a LoRA tensor": (partial(adapter, edit=renamed("lm_head.weight")), "is not a LoRA tensor of a linear layer"),
    "a tensor of another layer": (partial(adapter, edit=renamed(A.replace("layers.0", "layers.9"))), "does not belong"),
    "a tensor renamed": (partial(adapter, edit=renamed(A.replace("lora_A", "lora_B"))), "q_proj.lora_B"),
    "a tensor missing": (partial(adapter, edit=without_last), "is missing; the file is incomplete"),
    "a tensor of integers": (partial(adapter, edit=entry(dtype="I32")), "wanted an F32, F16 or BF16 matrix"),
    "a tensor that is not a matrix": (partial(adapter, edit=entry(shape=[256])), "is F32 [256]; wanted an F32"),
    "a non-finite value": (partial(adapter, edit=infinite), "has non-finite values"),
}  # fmt: skip


def case(folder, arrays=None, expected=None, settings=None, edit=None):
    """A golden case with arrays of batch.npz or expected.npz changed (None removes them), or keys of case.json."""
    made = copy_of(GOLDEN / "bitnet_q_only", folder)
    for name, changed in (("batch.npz", arrays), ("expected.npz", expected)):
        if changed is not None:
            old = {} if changed is ALONE else dict(np.load(made / name))
            np.savez(made / name, **{k: v for k, v in (old | changed).items() if v is not None})
    if settings:
        change(made / "case.json", **settings)
    if edit:
        edit(made)
    return ["verify", made]


ONES = np.ones((1, 3), int)
ALONE = {"nothing": np.zeros(1)}
VERIFY = {
    "no such case": (lambda t: ["verify", t / "none"], "no such folder; wanted a golden case directory"),
    "a case without a model": (partial(case, edit=lambda c: (c / "config.json").unlink()), "has no model (config.js"),
    "a case without a batch": (partial(case, edit=lambda c: (c / "batch.npz").unlink()), "batch.npz: no such file"),
    "a case that is no zip": (partial(case, edit=lambda c: (c / "batch.npz").write_bytes(b"PK")), "a readable .npz"),
    "a batch without labels": (partial(case, arrays={"labels": None}), "batch.npz: labels is missing"),
    "a batch of other shapes": (partial(case, arrays={"labels": np.ones((1, 2), int)}), "wanted [B, T] for ids, label"),
    "padding on the left": (partial(case, arrays={k: np.array([[0, 1, 1]]) for k in ("input_ids", "labels",
                            "attention_mask")}), "attention_mask has a 1 after a 0"),
    "ids beyond the vocabulary": (partial(case, arrays={k: np.array([[1, 9999]]) for k in ("input_ids", "labels",
                                  "attention_mask")}), "input_ids contains ids outside"),
    "nothing to learn": (partial(case, arrays={"input_ids": ONES, "attention_mask": ONES, "labels": -100 * ONES}),
                         "labels contain no target token"),
    "a gradient of nobody": (partial(case, expected={"grad.x": np.ones(1)}), "grad.x: the adapter has no such tensor"),
    "answers of another shape": (partial(case, expected={"step_losses": np.ones(9)}), "step_losses has shape (9,); wa"),
    "a text without a prompt": (partial(case, expected={"base_greedy": np.ones(2, int), "base_greedy_prompt": None}),
                                "base_greedy without base_greedy_prompt"),
    "a text of no tokens": (partial(case, expected={"greedy": np.array([99999]), "greedy_prompt": np.ones(1, int)}),
                            "is not a list of token ids"),
    "nothing to check": (partial(case, expected=ALONE), "contains nothing to check"),
    "steps without an optimizer": (partial(case, settings={"adamw": ...}), "adamw is missing; the optimizer steps"),
    "settings that are none": (partial(case, edit=lambda c: (c / "case.json").write_text(json.dumps([]))),
                               "case.json: wanted a JSON object"),
}  # fmt: skip

CASES = ADAPTERS | VERIFY
