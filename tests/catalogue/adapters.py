"""Adapters, and golden cases with them."""

import json
from functools import partial

import numpy as np

from . import DENSE, GOLDEN, change, copy_of, evaluate, tensors_of, write_tensors

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(folder, edit=None, **keys):
    """An adapter with keys of its config set, or its tensors edited: `edit(header, data)` returns both anew."""
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
    """A folder that is given as an adapter and holds this one file."""

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
    "for mlx-lm": (holding("adapters.safetensors"), "an adapter for mlx-lm, which only it reads: give the PEFT folder"),
    "for llama.cpp": (holding("adapter.gguf"), "an adapter in GGUF is for llama.cpp: here give the PEFT folder"),
    "a file for llama.cpp": (in_gguf, "an adapter in GGUF is for llama.cpp: here give the PEFT folder"),
    "a model": (holding("config.json"), "a model, not an adapter"),
    "a run that goes on": (holding("checkpoint-9/adapter_model.safetensors"), "its newest one so far: "),
    "no weights": (partial(files, edit=lambda a: (a / "adapter_model.safetensors").unlink()), "adapter_model.safetens"),
    "a pickle": (partial(files, edit=pickled), "adapter_model.bin is a pickle, which can run code"),
    "no config": (partial(files, edit=lambda a: (a / "adapter_config.json").unlink()), "adapter_config.json: no such"),
    "of another base": (lambda t: evaluate(t, adapter=GOLDEN / "bitnet_packed/adapter_init"), "has shape"),
    "no adapter of LoRA": (partial(adapter, peft_type="IA3"), "peft_type is 'IA3'; only LORA adapters are supported"),
    "whole modules": (partial(adapter, modules_to_save=["lm_head"]), "modules_to_save ['lm_head'] is not supported"),
    "trained biases": (partial(adapter, bias="all"), "bias is 'all'; trained biases are not supported"),
    "a start that changes the base": (partial(adapter, init_lora_weights="pissa"), "init_lora_weights 'pissa' is not"),
    "a setting of the future": (partial(adapter, use_xlora=True), "'use_xlora' is True; this setting is not supported"),
    "a rank of 0": (partial(adapter, r=0), "r is 0; wanted a positive whole number"),
    "a rank of a word": (partial(adapter, r="four"), "r is 'four'; wanted a positive whole number"),
    "an alpha of infinity": (partial(adapter, lora_alpha=float("inf")), "lora_alpha is inf; wanted a positive number"),
    "a dropout of all": (partial(adapter, lora_dropout=1.0), "lora_dropout is 1.0; wanted a number from 0 to below 1"),
    "rsLoRA of a word": (partial(adapter, use_rslora="yes"), "use_rslora is 'yes'; wanted true or false"),
    "targets of a number": (partial(adapter, target_modules=7), "target_modules is 7; wanted a list of module names"),
    "no targets": (partial(adapter, target_modules=[]), "lora_target_modules: empty, so there is nothing to train"),
    "targets too few": (partial(adapter, target_modules=["q_proj"]), "is of no targeted linear of the base model"),
    "targets that are nowhere": (partial(adapter, target_modules=["layers.9.mlp.up_proj"]), "matches no linear of thi"),
    "patterns of a list": (partial(adapter, rank_pattern=[1]), "rank_pattern is [1]; wanted an object of module patte"),
    "a pattern too intricate": (partial(adapter, rank_pattern={"(.*)*x": 4}), "is too intricate; name the module"),
    "a pattern that is none": (partial(adapter, alpha_pattern={"(q": 4}), "is no regular expression"),
    "another rank": (partial(adapter, r=8), "has shape [4, 64]; the base model and the rank in adapter_config.json wa"),
    "no tensor": (partial(adapter, edit=lambda h, d: ({}, b"")), "holds no tensor"),
    "a tensor of something else": (partial(adapter, edit=renamed("lm_head.weight")), "is no LoRA tensor of a linear"),
    "a tensor of another layer": (partial(adapter, edit=renamed(A.replace("layers.0", "layers.9"))), "is of no target"),
    "a tensor renamed": (partial(adapter, edit=renamed(A.replace("lora_A", "lora_B"))), "q_proj.lora_B"),
    "a tensor missing": (partial(adapter, edit=without_last), "is missing, one of 1; the file is not complete"),
    "a tensor of integers": (partial(adapter, edit=entry(dtype="I32")), "wanted a matrix of F32, F16 or BF16"),
    "a tensor that is no matrix": (partial(adapter, edit=entry(shape=[256])), "is F32 [256]; wanted a matrix of F32"),
    "a value that is not finite": (partial(adapter, edit=infinite), "holds a value that is not finite"),
}  # fmt: skip


def case(folder, arrays=None, expected=None, settings=None, edit=None):
    """A golden case with arrays of batch.npz or expected.npz set (None removes), or keys of case.json."""
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
    "a case without a model": (partial(case, edit=lambda c: (c / "config.json").unlink()), "holds no model (config.js"),
    "a case without a batch": (partial(case, edit=lambda c: (c / "batch.npz").unlink()), "batch.npz: no such file"),
    "a case that is no zip": (partial(case, edit=lambda c: (c / "batch.npz").write_bytes(b"PK")), "no readable .npz"),
    "a batch without labels": (partial(case, arrays={"labels": None}), "batch.npz: labels is missing"),
    "a batch of other shapes": (partial(case, arrays={"labels": np.ones((1, 2), int)}), "wanted [B, T] for ids, label"),
    "padding on the left": (partial(case, arrays={k: np.array([[0, 1, 1]]) for k in ("input_ids", "labels",
                            "attention_mask")}), "attention_mask has a 1 after a 0"),
    "ids beyond the vocabulary": (partial(case, arrays={k: np.array([[1, 9999]]) for k in ("input_ids", "labels",
                                  "attention_mask")}), "input_ids holds values that are no token"),
    "nothing to learn": (partial(case, arrays={"input_ids": ONES, "attention_mask": ONES, "labels": -100 * ONES}),
                         "labels hold no target token"),
    "a gradient of nobody": (partial(case, expected={"grad.x": np.ones(1)}), "grad.x: the adapter has no such tensor"),
    "answers of another shape": (partial(case, expected={"step_losses": np.ones(9)}), "step_losses has shape (9,); wa"),
    "a text without a prompt": (partial(case, expected={"base_greedy": np.ones(2, int), "base_greedy_prompt": None}),
                                "base_greedy without base_greedy_prompt"),
    "a text of no tokens": (partial(case, expected={"greedy": np.array([99999]), "greedy_prompt": np.ones(1, int)}),
                            "is no list of tokens of a vocabulary"),
    "nothing to check": (partial(case, expected=ALONE), "holds nothing that can be checked"),
    "steps without an optimizer": (partial(case, settings={"adamw": ...}), "adamw is missing; the optimizer steps"),
    "settings that are none": (partial(case, edit=lambda c: (c / "case.json").write_text(json.dumps([]))),
                               "case.json: wanted a JSON object"),
}  # fmt: skip

CASES = ADAPTERS | VERIFY
