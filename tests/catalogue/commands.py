"""Command lines, and folders that a command is given."""

import json
from functools import partial

from tiny_tokenizer import backend

from . import DENSE, GOLDEN, TERNARY, change, copy_of

A, BLOCKS = DENSE / "adapter_init", GOLDEN / "llama_q8_0"


def says(*argv):
    return lambda folder: [str(part).replace("{t}", str(folder)) for part in argv]


def generate(*argv):
    return says("generate", "--model", DENSE, *argv)


def export(*argv, adapter=A):
    return says("export", "--adapter", adapter, "--out", "{t}/out", *argv)


def lines(folder, content):
    (folder / "p.txt").write_bytes(content)
    return ["generate", "--model", DENSE, "--prompts", folder / "p.txt"]


def compared(folder, content):
    (folder / "p.txt").write_text(content)
    return ["bench", "--compare", folder / "p.txt"]


def exists(folder):
    (folder / "out").mkdir()
    (folder / "out" / "mine").write_text("")
    return export("--to", "peft")(folder)


def of_base(folder, base):
    adapter = copy_of(A, folder)
    change(adapter / "adapter_config.json", base_model_name_or_path=base)
    return export("--to", "merged", adapter=adapter)(folder)


def empty_run(folder):
    (folder / "run").mkdir()
    return ["report", folder / "run"]


def spoken(folder, *argv, template=None, bos="<s>", **keys):
    """`generate` with a model that has a tokenizer."""
    model = copy_of(DENSE, folder)
    (model / "tokenizer.json").write_text(backend().to_str())
    names = {"bos_token": bos, "eos_token": "</s>", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    change(model / "config.json", **keys)
    return ["generate", "--model", model, *argv]


def talk(*argv, **keys):
    return lambda folder: spoken(folder, *argv, **keys)


CASES = {
    "nothing to start from": (talk("--prompt", "", "--raw", bos=None), "the prompt is empty, and this model has no BO"),
    "no template": (talk("--prompt", "a", "--system", "b"), "this model has no chat template: use --raw"),
    "a prompt beyond the context": (talk("--prompt", "a b c d e f", "--raw", max_position_embeddings=4), "tokens"),
    "no such command": (says("trane"), "unknown command 'trane'; the nearest one is 'train'"),
    "an unknown option": (says("doctor", "--fix"), "unrecognized arguments: --fix (see lorawgpu doctor --help)"),
    "folders of no case": (says("verify", GOLDEN / "README.md", "{t}"), "wanted a golden case directory"),
    "no cases": (says("verify"), "the following arguments are required: CASE_DIR"),
    "a word for a number": (generate("--prompt", "a", "--top-k", "few"), "argument --top-k: invalid int value: 'few'"),
    "no prompt": (generate(), "one of the arguments --prompt --prompts --chat is required"),
    "no new tokens": (generate("--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens 0: wanted at least 1"),
    "compare without an adapter": (generate("--prompt", "a", "--compare"), "--compare shows an answer with and withou"),
    "raw turns": (generate("--chat", "--raw"), "--raw has no turns"),
    "heat below zero": (generate("--prompt", "a", "--temperature", -1), "temperature is -1.0; wanted a value from 1"),
    "no file of prompts": (generate("--prompts", "{t}/none"), "none: No such file or directory"),
    "an empty file of prompts": (partial(lines, content=b"\n"), "holds no prompt; wanted one per line"),
    "prompts not in UTF-8": (partial(lines, content=b"a\xff"), "p.txt: not UTF-8 at byte 2"),
    "text without a tokenizer": (generate("--prompt", "a"), "no tokenizer.json"),
    "an existing folder": (exists, "already exists; remove it, or give --out an"),
    "no such format": (export("--to", "onnx"), "invalid choice: 'onnx'"),
    "a merged PEFT adapter": (export("--to", "peft", "--merged"), "only --to gguf and ollama have two forms"),
    "types of an adapter": (export("--to", "gguf", "--quantize", "q8_0"), "only --to gguf --merged and ollama write"),
    "a system message of quotes": (export("--to", "ollama", "--system", 'a"""b'), "--system: a Modelfile cannot hold"),
    "a system message of MLX": (export("--to", "mlx", "--system", "x"), "--system: only --to ollama writes a Modelf"),
    "architecture of PEFT": (export("--to", "peft", "--arch", "llama"), "only --to gguf and ollama take an arch"),
    "dequantized PEFT": (export("--to", "peft", "--dequantize"), "--dequantize: only --to merged writes base"),
    "no base to merge into": (export("--to", "merged"), "names no base model; pass it with --model"),
    "no model": (says("generate", "--prompt", "a"), "no model given: pass it with --model, or an adapter that names"),
    "a missing base": (partial(of_base, base="/nowhere/base"), "the base model /nowhere/base: /nowhere/base: no"),
    "a ternary base": (export("--to", "merged", "--model", TERNARY, adapter=TERNARY / "adapter_init"), "is ternary, s"),
    "a quantized base": (export("--to", "merged", "--model", BLOCKS / "model.gguf", adapter=BLOCKS / "adapter_init"),
                         "is quantized; merged weights are float32 and take 0.0 GiB: add --dequantize"),
    "a dense base dequantized": (export("--to", "merged", "--model", DENSE, "--dequantize"), "--dequantize is for ter"),
    "an unknown architecture": (export("--to", "gguf", "--model", DENSE, "--arch", "mamba"), "--arch mamba: wanted "),
    "no such run": (says("report", "{t}/none"), "no such folder; wanted the output_dir of a run"),
    "a folder without a run": (empty_run, "holds no run"),
    "memory without a unit": (says("train", "c.yaml", "--memory", "8"), "--memory '8': wanted the GPU's memory in"),
    "a port that is none": (says("serve", "--model", DENSE, "--port", 70000), "--port 70000: wanted a number from 0"),
    "too many answers": (says("serve", "--model", DENSE, "--max-sequences", 65), "--max-sequences 65: wanted a number"),
    "a queue of less than none": (says("serve", "--model", DENSE, "--queue", -1), "--queue -1: wanted a number from 0"),
    "a key of spaces": (says("serve", "--model", DENSE, "--api-key", " "), "--api-key: wanted printable ASCII"),
    "two adapters of a name": (says("serve", "--model", DENSE, "--adapter", "a=x", "--adapter", "a=y"),
                               "--adapter a=y: wanted NAME=PATH, with a name of its own for each"),
    "an address of nobody": (says("serve", "--model", DENSE, "--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
    "no such device": (says("doctor", "--device", "Voodoo"), "device 'Voodoo': want auto, cpu, gpu, an index or a par"),
    "no tokens": (says("bench", "--tokens", 0), "--tokens 0: wanted a whole number above 0"),
    "half a sequence": (says("bench", "--tokens", 100, "--seq", 64), "--tokens 100: wanted a multiple of --seq 64"),
    "no file to compare with": (says("bench", "--compare", "{t}/none"), "none: No such file or directory"),
    "nothing to compare with": (partial(compared, content="tok/s"), "p.txt: no line of `lorawgpu bench`; wanted one"),
    "a device too many": (says("doctor", "--device", 99), "device '99': no adapter has that index"),
}  # fmt: skip
