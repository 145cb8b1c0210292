"""How each kind of file is read, as far as a command would go before it needs a GPU."""

from pathlib import Path

import numpy as np

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import GuardedTemplate, resolve_template
from lorawgpu.config.load import load_config
from lorawgpu.data.dataset import DatasetSpec, LoadSettings, tokenize
from lorawgpu.data.encode import EncodeSettings
from lorawgpu.files.safetensors import NUMPY_TYPES, SafetensorsFile
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.train.checkpoint import load_checkpoint, newest_checkpoint
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.resume import TrainerState
from lorawgpu.verify import cases as golden
from lorawgpu.weights.loader import open_checkpoint
from lorawgpu.weights.tensors import is_linear

GOLDEN = Path(__file__).parent.parent / "golden"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
TEXT = "Assistant: Yes, the answer is 42.\n naïve café <|im_end|>" + 60 * "a"


def safetensors(path):
    file = SafetensorsFile(path)
    for name, entry in file.entries.items():
        if entry.dtype in NUMPY_TYPES:
            file.read(name).astype(np.float32).sum()


def model(path):
    """A folder's file or a .gguf: everything that training reads of it."""
    checkpoint = open_checkpoint(path if path.suffix == ".gguf" else path.parent)
    for name in checkpoint.keys():
        if checkpoint.config.ternary and is_linear(name):
            checkpoint.ternary(name)
        else:
            checkpoint.dense(name).float32()
    attention = checkpoint.config.layers[0].attention
    attention.rope.inv_freq(attention.head_dim)
    if path.suffix == ".gguf" or (path.parent / "tokenizer.json").exists():
        checkpoint.tokenizer().encode("a")


def use(tokenizer):
    ids = tokenizer.encode(TEXT, add_special=True)
    tokenizer.encode(TEXT, parse_special=False)
    tokenizer.decode(ids)
    if tokenizer.chat_template is not None:
        GuardedTemplate(tokenizer.chat_template, tokenizer.special_tokens).render(TURNS)


def tokenizer(path):
    use(GuardedTokenizer.from_hf_folder(path.parent))


def adapter(path):
    read_adapter(path.parent, open_checkpoint(GOLDEN / "llama_dense").config)


def checkpoint(path):
    found = newest_checkpoint(path.parent.parent)
    snapshot = load_checkpoint(path.parent)
    assert found is not None
    if "bad_steps" in snapshot.state:
        TrainerState.from_json(snapshot.state)


def template(path):
    found = resolve_template(None, str(path), None, {"bos_token": "<s>", "eos_token": "</s>"})
    found.render(TURNS, add_generation_prompt=True)


def data(path):
    """Under the type that its keys have, with skipped lines and without."""
    words = GuardedTokenizer.from_hf_folder(path.parent / "tokenizer")
    settings = EncodeSettings(64, "truncate", False, ("assistant",))
    chat = GuardedTemplate(BUILT_IN["chatml"], words.special_tokens)
    for skip in (True, False):
        tokenize(DatasetSpec(str(path)), LoadSettings(settings, words, chat, 500, skip, workers=1))


def config(path):
    load_config(path)


def npz(path):
    golden.read_case(path.parent)


def metrics(path):
    for _ in read_metrics(path):
        pass


READERS = {f.__name__: f for f in
           (safetensors, model, tokenizer, adapter, checkpoint, template, data, config, npz, metrics)}  # fmt: skip
GUARDED = (tokenizer, template, data)  # read in a process of their own
