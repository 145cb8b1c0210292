"""Inputs of a given size, one function for each limit of docs/limits.md: what is said of it, "" if it is taken whole.

Sizes are in the unit of the table.
"""

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from test_checkpoint import snapshot
from tiny_tokenizer import backend

from lorawgpu.chat.template import ChatTemplate
from lorawgpu.config.load import load_config
from lorawgpu.config.source import ConfigProblem, format_problems
from lorawgpu.data import workers
from lorawgpu.data.compressed import open_bytes, read_whole
from lorawgpu.data.configurations import Within, narrowed
from lorawgpu.data.read_files import parse, split_lines
from lorawgpu.data.token_store import Chunk, Counts, StoreWriter, TokenStore
from lorawgpu.errors import UserError
from lorawgpu.families.keys import Keys
from lorawgpu.files.gguf import GgufFile
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.lora.base_name import named_base
from lorawgpu.lora.peft_config import read_lora_config
from lorawgpu.report.record import read_run
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.tokenizer.hf import _text as template_text
from lorawgpu.train.checkpoint import SUMS_FILE, load_checkpoint, save_checkpoint
from lorawgpu.train.metrics import read_metrics
from lorawgpu.util.printable import message

CONFIG = "base_model: a/b\ndatasets: [{path: a/b}]\n"
FILE = 40_000  # bytes of a compressed file
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def file(folder: Path, name: str, content) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def json_file(folder, size):
    read_json_object(file(folder, "c.json", b'{"a": 1}'.ljust(size)))


def line(folder, size):
    (_, raw), *rest = split_lines(file(folder, "d.jsonl", b'{"text": "' + b"x" * (size - 12) + b'"}').open("rb"), 1)
    assert not rest and parse("d.jsonl", 1, raw)


def expanded(limit, read):
    """`limit`: how far a file may expand beyond its first 8 MiB; one byte more is beyond it."""

    def case(folder, size):
        whole = bytes((8 << 20) + limit * FILE + (size > limit))
        read(file(folder, "d.jsonl.gz", gzipped(whole, FILE)))

    return case


def gzipped(content: bytes, size: int) -> bytes:
    """A file of this size: an empty member with a long name fills it up."""
    packed, filler = gzip.compress(content), io.BytesIO()
    gzip.GzipFile("x" * (size - len(packed) - 21), "wb", fileobj=filler).close()
    return packed + filler.getvalue()


def in_pieces(path):
    with open_bytes(path) as stream:
        while stream.read(1 << 20):
            pass


def as_a_whole(path):
    with open_bytes(path) as stream:
        read_whole(path, stream)


def skipped_messages(folder, size):
    empty = np.empty(0, np.int32)
    with StoreWriter(folder / "store") as writer:
        chunk = Chunk(
            empty, empty, empty.astype(np.int64), empty.astype(np.int64), Counts(skipped=size), ["bad"] * size
        )
        writer.append(0, chunk)
        writer.finish()
    store = TokenStore(folder / "store", {})
    assert store.counts.skipped == size
    return "" if len(store.skipped) == size else "not kept"


def card(folder, size):
    begin, end = "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n", "\n---"
    text = begin + "#\n" * ((size - len(begin) - len(end)) // 2) + "#" * ((size - len(begin) - len(end)) % 2) + end
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    return "" if narrowed(files, folder, Within(), ("train",), lambda: text)[0] == files[:1] else "not searched"


def stopped_records(folder, size):
    """The last one of `size`."""
    task, stop = workers._Task("d.jsonl", 0, 0), workers.guard.WorkerStopped("took longer than 8 s")
    stop.line = 7
    workers._Pool._without(SimpleNamespace(stops=size - 1), task, stop, True)


def template_file(folder, size):
    template_text(file(folder, "chat_template.jinja", "{# " + "x" * (size - 6) + " #}"))


def tokenizer(folder, size):
    text = backend().to_str()
    Tokenizer.from_hf_folder(file(folder, "tokenizer.json", text + " " * (size - len(text.encode()))).parent)


def template(folder, size):
    ChatTemplate("x" * size, {})


def header(folder, size):
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(size)
    SafetensorsFile(file(folder, "m.safetensors", size.to_bytes(8, "little") + text + bytes(4)))


def dimensions(folder, size):
    import gguf

    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_tensor("a", np.zeros((1,) * size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    GgufFile(folder / "m.gguf")


def key(name):
    return lambda folder, size: Keys({name: size}, "config.json").integer(name) and None


def adapter(change):
    def case(folder, size):
        path = file(folder, "adapter_config.json", json.dumps(ADAPTER | {"rank_pattern": change(size)}))
        read_lora_config(path, ["model.layers.0.self_attn.q_proj"])

    return case


def trained_rows(folder, size):
    path = file(folder, "adapter_config.json", json.dumps(ADAPTER | {"trainable_token_indices": list(range(size))}))
    read_lora_config(path, ["model.layers.0.self_attn.q_proj"])


def base_name(folder, size):
    file(folder, "adapter_config.json", json.dumps({"base_model_name_or_path": "m" * size}))
    return "" if named_base(folder) == "m" * size else "no name"


def config(folder, size):
    load_config(file(folder, "c.yaml", CONFIG + "#" * (size - len(CONFIG))))


def count(folder, size):
    load_config(file(folder, "c.yaml", f"{CONFIG}max_steps: {size}\n"))


def metrics(folder, size):
    read_metrics(file(folder, "metrics.jsonl", b'{"step": 1}\n'.ljust(size)))


def bad_lines(folder, size):
    read_metrics(file(folder, "metrics.jsonl", "x\n" * size))


def shown_config(folder, size):
    file(folder, "config.yaml", "#" * size)
    return "" if len(read_run(folder).config_text) == size else "cut"


def shown_sample(folder, size):
    record = {"step": 1, "samples": [{"prompt": "?", "text": "x" * size}]}
    file(folder, "metrics.jsonl", json.dumps(record))
    return "" if read_run(folder).samples()[0][2][0][1] == "x" * size else "cut"


def sums(folder, size):
    saved = save_checkpoint(folder, snapshot(5), "base")
    text = (saved / SUMS_FILE).read_bytes()
    (saved / SUMS_FILE).write_bytes(text + b"#" * (size - len(text)))
    try:
        load_checkpoint(saved)
    except UserError as error:  # a line too many is damage at any size: what matters is whether they were read
        return "" if "is not the file that was saved" in str(error) else str(error)


def shown_message(folder, size):
    return "" if message("x" * size) == "x" * size else "characters"


def problems(folder, size):
    found = [ConfigProblem((f"key{i}",), f"key{i}: bad") for i in range(size)]
    text = format_problems(folder / "c.yaml", found, {}, [])
    return "" if text.count(": bad") == size else "counted"


CASES = {
    "data.read_files.MAX_RECORD": (line, "longer than 16 MiB"),
    "data.compressed.MAX_EXPANSION": (expanded(200, in_pieces), "more than 200-fold"),
    "data.compressed.MAX_WHOLE": (expanded(32, as_a_whole), "more than 32-fold"),
    "data.token_store.MAX_SKIPPED": (skipped_messages, "not kept"),
    "data.configurations.MAX_CARD": (card, "not searched"),
    "data.workers.MAX_STOPPED": (stopped_records, "more than 10 records of this data set did"),
    "files.untrusted.MAX_JSON": (json_file, "at most 16777216 are allowed"),
    "tokenizer.hf.MAX_TOKENIZER": (tokenizer, "at most 16384 are allowed"),
    "tokenizer.hf.MAX_TEMPLATE": (template_file, "at most 1048576 are allowed"),
    "chat.template.MAX_TEMPLATE": (template, "at most 65,536 are allowed"),
    "files.safetensors.MAX_HEADER": (header, "header of 25000001 bytes (at most 25000000)"),
    "files.gguf.MAX_DIMS": (dimensions, "has 5 dimensions; wanted 1 to 4"),
    "families.modules.MAX_LAYERS": (key("num_hidden_layers"), "num_hidden_layers is 1025; wanted a whole number from"),
    "lora.peft_config._MAX_PATTERNS": (adapter(lambda n: {f"a{i}": 1 for i in range(n)}), "has 501 patterns; at most"),
    "lora.peft_config._MAX_PATTERN": (adapter(lambda n: {"a" * n: 1}), "is too complex"),
    "lora.peft_config._MAX_QUANTIFIERS": (adapter(lambda n: {"a+" * n: 1}), "is too complex"),
    "lora.ends.MAX_TOKENS": (trained_rows, "16,385 ids; wanted at most 16,384"),
    "lora.base_name._MAX_NAME": (base_name, "no name"),
    "config.source.MAX_BYTES": (config, "larger than 1,048,576 bytes"),
    "config.types.MAX_COUNT": (count, "max_steps: got 2147483648; input should be less than or equal to 2147483647"),
    "train.metrics.MAX_METRICS": (metrics, "are allowed"),
    "train.metrics.MAX_BAD_LINES": (bad_lines, "more than 1,000 of its lines are no records"),
    "report.record.MAX_CONFIG": (shown_config, "cut"),
    "report.record.MAX_TEXT": (shown_sample, "cut"),
    "train.checkpoint.MAX_SUMS": (sums, "at most 4096 are allowed"),
    "util.printable.MAX_MESSAGE": (shown_message, "characters"),
    "config.source.MAX_PROBLEMS": (problems, "counted"),
} | {
    f'families.keys.SIZE_LIMITS["{name}"]': (key(name), f"{name} is {limit + 1}; wanted a whole number")
    for name, limit in (
        ("vocab_size", 4194304), ("hidden_size", 131072), ("intermediate_size", 1048576), ("head_dim", 512),
        ("max_position_embeddings", 1073741824),
    )
}  # fmt: skip
# Too large to be reached in a test: lowered to so much first.
LOWERED = {"train.metrics.MAX_METRICS": 1 << 12, "tokenizer.hf.MAX_TOKENIZER": 1 << 14}
# Limits of time and memory, of work in other processes, and of pictures: the test that meets them.
ELSEWHERE = {
    "guard.limits.SECONDS[3]": "test_guard.py: test_what_stops_a_worker_is_said_with_the_line",
    "guard.limits.SECONDS[1]": "test_guard.py: test_what_stops_a_worker_is_said_with_the_line",
    "guard.limits.MEMORY": "test_guard.py: test_what_stops_a_worker_is_said_with_the_line",
    "guard.limits.LOADING_MEMORY": "test_guard.py: test_without_limits_of_the_system_a_watchdog_stops_it",
    "guard.limits.MAX_REPLY": "test_guard.py: test_what_stops_a_worker_is_said_with_the_line",
    "data.workers.MEMORY": "test_dataset.py: test_the_default_number_of_workers_is_bounded_by_memory",
    "tokenizer.sentencepiece.MAX_MERGES": "test_sentencepiece.py: test_pieces_that_would_take_quadratic_time_or_memory",
    "report.charts.MAX_MARKS": "test_report.py: test_hostile_records_make_a_page_of_bounded_size",
}
