"""Configs and checkpoints of `train`, beyond those of tests/test_errors.py."""

from dataclasses import replace
from functools import partial

from golden_case import GOLDEN
from test_checkpoint import snapshot
from tiny_run import write_config, write_data

from lorawgpu.files.run_folder import OPTIMIZER_FILE, STATE_FILE
from lorawgpu.train.checkpoint import save_checkpoint

BLOCKS = GOLDEN / "llama_q8_0" / "model.gguf"


def config(folder, content, *argv):
    (folder / "c.yaml").write_bytes(content)
    return ["train", folder / "c.yaml", *argv]


def option(*argv):
    return lambda folder: ["train", write_config(folder), *argv]


def resume(folder, spoil=lambda path: None, choice="{checkpoint}", steps=(7,), **state):
    """A run with foreign checkpoints, the last of which was spoiled; `choice` None: not resumed.

    `state`: entries added to that of the trainer.
    """
    path = write_config(folder)
    taken = [snapshot(step) for step in steps]
    taken = [replace(one, state=one.state | state) for one in taken]
    saved = [save_checkpoint(folder / "out", one, "base") for one in taken]
    for last in saved[-1:]:
        spoil(last)
    chosen = choice and choice.format(checkpoint=saved[0] if saved else "")
    return ["train", path, *(["--resume", chosen] if chosen else [])]


def there(folder, *argv):
    (folder / "out").mkdir()
    (folder / "out" / "adapter_model.safetensors").touch()
    return ["train", write_config(folder), *argv]


def only_tests(folder):
    (folder / "set").mkdir()
    write_data(folder / "set" / "test.jsonl")
    return ["train", write_config(folder, datasets=[{"path": str(folder / "set")}])]


def ends(*values, **keys):
    """A run on the tied golden model with such settings of its embedding and head."""
    return lambda folder: ["train", write_config(folder, **keys), *(part for v in values for part in ("--set", v))]


def cut(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


IN_4_BIT = ("--set", "load_in_4bit=true")
CASES = {
    "shares of other ranks": (option("--set", "micro_batches_per_rank=[1, 2]"), "has 2 entries; wanted 1"),
    "a folder of test files alone": (only_tests, "no file to train on, only test.jsonl: name one as `path`"),
    "a config that is data": (partial(config, content=b"a: 1\n" * (1 << 18)), "larger than 1,048,576 bytes"),
    "a config not in UTF-8": (partial(config, content=b"a: \xff\n"), "not UTF-8 at byte 3: save the file as UTF-8"),
    "a config that is not YAML": (partial(config, content=b"a: [1\n"), "not valid YAML"),
    "an invalid date": (partial(config, content=b"output_dir: 2024-99-99\n"), "not valid YAML: month"),
    "a config of a list": (partial(config, content=b"[1]\n"), "contains a list; wanted `key: value` lines"),
    "a config of text": (partial(config, content=b"hello\n"), "contains a str; wanted `key: value` lines"),
    "a quantized model in 4 bit": (option("--set", f"base_model={BLOCKS}", "--set", "load_in_4bit=true"),
                                   "model.gguf: is quantized already; remove load_in_4bit"),
    "a ternary model in 4 bit": (
        option("--set", f"base_model={GOLDEN / 'bitnet_packed'}", "--set", "adapter=qlora", *IN_4_BIT),
        "is quantized already; remove load_in_4bit, and if adapter is qlora, set it to lora"),
    "two configs": (partial(config, content=b"a: 1\n---\nb: 1\n"), "line 2, column 1: a second YAML document starts"),
    "no config": (lambda t: ["train", t / "none.yaml"], "none.yaml: cannot read the config: No such file"),
    "a setting without a value": (option("--set", "lora_r"), "--set lora_r: wanted key=value"),
    "a setting that is not YAML": (option("--set", "lora_r=[1"), "--set: lora_r: got '[1'; input should be a valid i"),
    "a setting of no entry": (option("--set", "datasets.7.path=a"), "datasets has no entry 7: it has 1, count"),
    "an end in two ways": (ends("lora_modules_to_save=[lm_head]", "lora_target_modules=[lm_head]"),
                           "lm_head is in lora_modules_to_save and in lora_target_modules: train it in one of"),
    "a row beyond the table": (ends("peft_trainable_token_indices=[500000]"), "token 500000 is outside of the"),
    "rows of a tied head": (ends("peft_trainable_token_indices={embed_tokens: [5], lm_head: [6]}"),
                            "lm_head is tied to embed_tokens: give the ids for that alone"),
    "a tied head in two ways": (ends("peft_trainable_token_indices=[5]", "lora_modules_to_save=[lm_head]"),
                                "trains rows of lm_head too, which is tied to embed_tokens"),
    "an embedding with per-layer inputs": (ends("peft_trainable_token_indices=[5]", base_model=str(GOLDEN / "gemma4")),
                                           "the per-layer inputs of Gemma 4 depend on it too"),
    "too little memory": (option("--dry-run", "--memory", "0.1MB"),
                          "--memory 0.1MB: nothing fits. The least is"),
    "an existing run": (partial(resume, choice=None), "already holds a run, up to checkpoint-7: continue it with"),
    "an existing adapter": (there, "already holds adapter_model.safetensors of another run or of y"),
    "an adapter to resume from": (lambda t: there(t, "--resume", "auto"), "and no checkpoint to resume from"),
    "a folder beyond any name": (option("--set", f"output_dir={'a' * 300}"), "cannot be created or written to"),
    "a checkpoint of another version": (partial(resume, format=2), "another version of lorawgpu wrote this checkpoint"),
    "a checkpoint with a part missing": (resume, "is missing or malformed in its state"),
    "a checkpoint without moments": (partial(resume, spoil=lambda p: (p / OPTIMIZER_FILE).unlink()), "is missing"),
    "a truncated checkpoint": (partial(resume, spoil=cut(OPTIMIZER_FILE)), "is not the file that was saved (trunc"),
    "a checkpoint of another state": (partial(resume, spoil=lambda p: (p / STATE_FILE).write_text("{}")), "was saved"),
    "a missing checkpoint": (partial(resume, choice="nowhere", steps=()), "nowhere: no such folder; wanted a che"),
    "no complete checkpoint": (partial(resume, spoil=cut(STATE_FILE), choice="auto"), "none of its 1 checkpoints"),
    "a missing checkpoint of a run": (partial(resume, choice="nowhere"), "nowhere: no such folder; wanted a che"),
    "a checkpoint with later ones": (partial(resume, steps=(7, 9)), "already holds checkpoint-9"),
}  # fmt: skip
