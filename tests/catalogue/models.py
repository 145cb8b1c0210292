"""Mistakes in models: config.json, safetensors, GGUF, tokenizers."""

import json
import os
from functools import partial

import bitnet_gguf
import numpy as np
import test_bitsandbytes
import test_gguf
from packed_models import DECLARED, write_packed
from test_tokenizer import gguf_values
from tiny_tokenizer import backend

from lorawgpu.files.gguf import GgufFile

from . import DENSE, RECORD, TERNARY, change, copy_of, evaluate, tensors_of, write_tensors

MASTER = DENSE.parent / "bitnet_master"
INFINITY = b"\x80\x7f"  # in BF16
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
LINEAR, SCALE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"


def config(folder, base=DENSE, **keys):
    model = copy_of(base, folder)
    change(model / "config.json", **keys)
    return evaluate(folder, model)


def quantization(folder, **keys):
    good = json.loads((TERNARY / "config.json").read_text())["quantization_config"]
    return config(folder, TERNARY, quantization_config={k: v for k, v in (good | keys).items() if v is not ...})


def file(folder, name, content, base=DENSE):
    """Replace a file of the model, or with None remove it."""
    model = copy_of(base, folder)
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return evaluate(folder, model)


def tensor(folder, edit, base=DENSE):
    """`edit(header, data)` returns the new header and data of the weights."""
    model = copy_of(base, folder)
    path = model / "model.safetensors"
    write_tensors(path, *edit(*tensors_of(path)))
    return evaluate(folder, model)


def entry(name, **keys):
    return lambda header, data: (header | {name: header[name] | keys}, data)


def bytes_of(name, value):
    """Replace the first bytes of a tensor."""

    def edit(header, data):
        at = header[name]["data_offsets"][0]
        return header, data[:at] + value + data[at + len(value) :]

    return edit


def large_config(folder):
    model = copy_of(DENSE, folder)
    os.truncate(model / "config.json", 65 << 20)
    return evaluate(folder, model)


def index(folder, weights):
    model = copy_of(DENSE, folder)
    (model / "model.safetensors").rename(model / "one.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(weights))
    return evaluate(folder, model)


HF = {
    "no name": (lambda t: evaluate(t, model=""), "the model's name is empty"),
    "a URL": (partial(evaluate, model="https://huggingface.co/a/b/tree/main"), "use the repo id instead: a/b."),
    "a URL without https": (partial(evaluate, model="hf.co/a/b"), "use the repo id instead: a/b."),
    "a URL of a file": (partial(evaluate, model="https://huggingface.co/a/b/resolve/main/q/c.gguf?download=true"),
                             "use the repo id instead: a/b/q/c.gguf."),
    "a URL elsewhere": (partial(evaluate, model="s3://bucket"), "URLs are not supported; wanted a model folder"),
    "an adapter": (partial(evaluate, model=DENSE / "adapter_init"), "that is an adapter, not a model; use it as the"),
    "merged to evaluate": (partial(config, base=TERNARY, quantization_config=...), "written by --to merged --deq"),
    "no config": (partial(file, name="config.json", content=None), "no config.json; wanted a Hugging Face model"),
    "config of a list": (partial(file, name="config.json", content="[]"), "wanted a JSON object, got list"),
    "config that is not JSON": (partial(file, name="config.json", content="{"), "not valid JSON"),
    "a huge config": (large_config, "config.json: 68157440 bytes; at most 16777216"),
    "config too deep": (partial(file, name="config.json", content="[" * 99999), "nested too deeply"),
    "architectures no list": (partial(config, architectures="Llama"), "wanted a list of names"),
    "another architecture": (partial(config, architectures=["LlamaForTokens"]), "architecture LlamaForTokens is not"),
    "a window": (partial(config, sliding_window=128), "sliding_window 128 is not supported yet"),
    "biases": (partial(config, attention_bias=True), "attention_bias (qkv_bias) = True is not supported yet"),
    "size missing": (partial(config, hidden_size=...), "hidden_size is missing"),
    "size of a word": (partial(config, vocab_size="many"), "vocab_size is 'many'; wanted a whole number from 1"),
    "a huge size": (partial(config, num_hidden_layers=10**9), "num_hidden_layers is 1000000000; wanted"),
    "a head too large": (partial(config, head_dim=1024), "head_dim is 1024; wanted a whole number from 1 to 512"),
    "a head too large, implied": (partial(config, head_dim=..., num_attention_heads=1, hidden_size=1024),
                                "head_dim is 1024; wanted a whole number from 1 to 512"),
    "eps of a word": (partial(config, rms_norm_eps="tiny"), "rms_norm_eps is 'tiny'; wanted a number above 0"),
    "eps too large": (partial(config, rms_norm_eps=2.0), "rms_norm_eps is 2.0; wanted a number between 0 and 1"),
    "tied by a word": (partial(config, tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; wanted true or"),
    "end token of a word": (partial(config, eos_token_id="</s>"), "eos_token_id is '</s>'; wanted a token id"),
    "end token outside": (partial(config, eos_token_id=999), "eos_token_id 999 is outside the vocabulary of 320"),
    "heads that do not divide": (partial(config, head_dim=..., num_attention_heads=3), "not a multiple of num_attenti"),
    "groups that do not divide": (partial(config, num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
    "odd heads": (partial(config, head_dim=15), "head_dim is 15; wanted an even number"),
    "theta below 1": (partial(config, rope_theta=0.5), "rope_theta is 0.5; wanted a finite number of at least 1"),
    "rope of a list": (partial(config, rope_scaling=[1]), "rope_scaling is [1]; wanted an object"),
    "partial RoPE": (partial(config, rope_scaling={"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5"),
    "llama3 without a factor": (partial(config, rope_scaling={"rope_type": "llama3", "low_freq_factor": 1,
                                "high_freq_factor": 4}), "rope_scaling: factor is missing; wanted a number"),
    "llama3 factors reversed": (partial(config, rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                           "high_freq_factor": 1}), "low_freq_factor 4.0 is not below high_freq_factor 1.0"),
    "bitnet without quantization": (partial(config, base=TERNARY, quantization_config=...), "needs a quantization_con"),
    "quantization of a word": (partial(config, base=TERNARY, quantization_config="b"), "wanted an object of settings"),
    "another quantization": (partial(quantization, quant_method="fp8"), "quant_method 'fp8' is not supported"),
    "norm in the quantizer": (partial(quantization, use_rms_norm=True), "use_rms_norm True is not supported"),
    "kept in bf16": (partial(quantization, modules_to_not_convert=["q_proj"]), "modules_to_not_convert ['q_proj'] is"),
    "another linear": (partial(quantization, linear_class="fancy"), "linear_class 'fancy' is not known"),
    "another mode": (partial(quantization, quantization_mode="later"), "quantization_mode 'later' is not known"),
    "online bitlinear": (partial(quantization, quantization_mode="online", linear_class="bitlinear"),
                         "online needs linear_class autobitlinear"),
    "generation config": (partial(file, name="generation_config.json", content='{"eos_token_id": "x"}'),
                          "generation_config.json: eos_token_id is 'x'"),
    "no weights": (partial(file, name="model.safetensors", content=None), "no model.safetensors or model.safete"),
    "weights cut": (partial(file, name="model.safetensors", content=b"123"), "3 bytes, too short for a safetensors"),
    "weights of HTML": (partial(file, name="model.safetensors", content=b"<!DOCTYPE html> not found"), "not a safeten"),
    "header of a list": (partial(tensor, edit=lambda h, d: (b"[]", b"")), "header is list; wanted an object"),
    "metadata of numbers": (partial(tensor, edit=lambda h, d: (h | {"__metadata__": {"a": 1}}, d)), "__metadata__ is"),
    "tensor without offsets": (partial(tensor, edit=lambda h, d: (h | {NORM: {"dtype": "F32"}}, d)), "needs exactly"),
    "unknown dtype": (partial(tensor, edit=entry(NORM, dtype="F12")), "unknown dtype 'F12'"),
    "shape of words": (partial(tensor, edit=entry(NORM, shape=["a"])), "is not a list of at most 8 sizes"),
    "shape beyond memory": (partial(tensor, edit=entry(NORM, shape=[0, 2**62])), "is too large for any memory"),
    "offsets of one": (partial(tensor, edit=entry(NORM, data_offsets=[0])), "is not a start and an end"),
    "offsets of another size": (partial(tensor, edit=entry(NORM, shape=[63])), "but data_offsets are"),
    "bytes too many": (partial(tensor, edit=lambda h, d: (h, d + b"x")), "bytes after the last tensor"),
    "bytes too few": (partial(tensor, edit=lambda h, d: (h, d[:-1])), "truncated; download it again"),
    "overlapping tensors": (partial(tensor, edit=entry(NORM, data_offsets=[0, 128])), "overlaps the previous"),
    "tensor of integers": (partial(tensor, edit=entry(NORM, dtype="I16")), "has dtype I16; wanted one of BF16"),
    "packed in a dense model": (partial(tensor, edit=entry(NORM, dtype="U8", shape=[128])), "it looks packed, but"),
    "tensor missing": (partial(tensor, edit=lambda h, d: ({k if k != NORM else "norm": v for k, v in h.items()}, d)),
                       f"1 tensor ({NORM}) missing"),
    "biases in the file": (partial(tensor, edit=lambda h, d: (h | {"model.layers.0.self_attn.q_proj.bias": {
        "dtype": "F32", "shape": [0], "data_offsets": [len(d), len(d)]}}, d)), "not part of the config's architecture"),
    "shape of another model": (partial(config, intermediate_size=128), "has shape [160, 64]; the config wants [128, 6"),
    "scale of zero": (partial(tensor, base=TERNARY, edit=bytes_of(SCALE, b"\0\0")), "weight_scale is [0.0]; wanted on"),
    "non-ternary codes": (partial(tensor, base=TERNARY, edit=bytes_of(LINEAR, b"\xff")), "non-ternary codes"),
    "offline, yet of master weights": (
        partial(config, base=MASTER, quantization_config={"quant_method": "bitnet"}),
        "weight_scale"),
    "master weights of infinity": (partial(tensor, base=MASTER, edit=bytes_of(LINEAR, INFINITY)),
                                   "has non-finite values; the file is damaged"),
    "index without a map": (partial(index, weights={"metadata": {}}), "weight_map is missing"),
    "index that leaves the folder": (partial(index, weights={"weight_map": {NORM: "../x.safetensors"}}),
                                     "is not the name of a .safetensors file"),
    "index of a tensor that is not there": (partial(index, weights={"weight_map": {"x": "one.safetensors"}}),
                                            "tensor 'x' is not in one.safetensors"),
    "index of a file that is not there": (partial(index, weights={"weight_map": {NORM: "two.safetensors"}}),
                                          "two.safetensors: no such file"),
    "a file that is not a model": (lambda t: evaluate(t, __file__), "wanted a model folder or a .gguf file"),
    "a built-in that is not there": (lambda t: evaluate(t, "builtin:gpt5"), "no built-in model has that name"),
}  # fmt: skip


def gguf(folder, types=None, metadata=None, words=None, data=RECORD, **options):
    """A GGUF of the dense model with these tokenizer values; `data` to evaluate on."""
    values = {} if words is None else gguf_values(backend(), pre="gpt-2") | words
    keys = (metadata or {}) | {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    (folder / "d.jsonl").write_text(data)
    path = test_gguf.write_gguf(folder / "m.gguf", types=types, metadata=keys, **options)
    return evaluate(folder, path, data=folder / "d.jsonl")


def gguf_bytes(folder, edit):
    path = test_gguf.write_gguf(folder / "m.gguf")
    path.write_bytes(edit(path.read_bytes()))
    return evaluate(folder, path)


def gguf_scale(folder, bits=b"\x00\x7c"):
    """A file with an infinite block scale."""
    source = DENSE.parent / "llama_q8_0" / "model.gguf"
    raw, at = bytearray(source.read_bytes()), GgufFile(source).tensors["blk.0.ffn_up.weight"].offset
    raw[at : at + 2] = bits
    (folder / "m.gguf").write_bytes(raw)
    return evaluate(folder, folder / "m.gguf")


def gguf_ternary(folder, **options):
    test_gguf.write_ternary(folder / "m.gguf", test_gguf.Q.TQ2_0, **options)
    return evaluate(folder, folder / "m.gguf")


def gguf_made(folder, rest, tensors=0, keys=0):
    path = folder / "m.gguf"
    path.write_bytes(b"GGUF" + np.array([3], "<u4").tobytes() + np.array([tensors, keys], "<u8").tobytes() + rest)
    return evaluate(folder, path)


def text(words, **options):
    return partial(gguf, words=words, data='{"text": "Hello"}\n', **options)


def name(value: bytes) -> bytes:
    return np.array([len(value)], "<u8").tobytes() + value


def info(dims, kind, offset=0, label=b"a") -> bytes:
    head = name(label) + np.array([len(dims)], "<u4").tobytes() + np.array(dims, "<u8").tobytes()
    return head + np.array([kind], "<u4").tobytes() + np.array([offset], "<u8").tobytes()


NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
SPACES = NO_IDS | {"model": "llama", "scores": [0.0] * 2, "tokens": ["a", "b"], "token_type": [1, 1]}
SPACES |= {"remove_extra_whitespaces": True}
U32 = np.array([4, 1], "<u4").tobytes()
GGUF = {
    "gguf cut": (partial(gguf_bytes, edit=lambda raw: raw[:20]), "20 bytes, too short for a GGUF file"),
    "gguf cut later": (partial(gguf_bytes, edit=lambda raw: raw[:-100]), "it is truncated, download it again"),
    "gguf cut in its header": (partial(gguf_bytes, edit=lambda raw: raw[:300]), "it is damaged"),
    "gguf of something else": (partial(gguf_bytes, edit=lambda raw: b"LLAM" + raw[4:]), "not a GGUF file"),
    "gguf of an unknown version": (partial(gguf_bytes, edit=lambda raw: raw[:4] + b"\x09" + raw[5:]), "version 9"),
    "gguf key twice": (partial(gguf_made, rest=2 * (name(b"a") + U32), keys=2), "metadata key 'a' appears twice"),
    "gguf key of an unknown type": (partial(gguf_made, rest=name(b"a") + b"M\0\0\0", keys=1), "has value type 77"),
    "gguf string beyond the file": (partial(gguf_made, rest=b"\xff" * 40, keys=1), "header wants 18446744073709551615"),
    "gguf of huge counts": (partial(gguf_made, rest=bytes(40), tensors=2**60), "tensors cannot fit into"),
    "gguf string that is not UTF-8": (partial(gguf_made, rest=name(b"\xff") + U32 + bytes(9), keys=1), "is not UTF-8"),
    "gguf of seven dimensions": (partial(gguf_made, rest=info([1] * 7, 0), tensors=1), "has 7 dimensions"),
    "gguf of an unknown type": (partial(gguf_made, rest=info([32], 99), tensors=1), "has unknown type number 99"),
    "gguf type of bitnet.cpp": (partial(gguf_made, rest=info([32], 38), tensors=1), "has bitnet.cpp's type TL1"),
    "gguf i2_s of a vector": (partial(gguf_made, rest=info([32], 36), tensors=1), "wanted a matrix of whole bytes of"),
    "gguf row of half a block": (partial(gguf_made, rest=info([33], 8), tensors=1), "wanted rows of multiples of 32"),
    "gguf tensor twice": (partial(gguf_made, rest=info([8], 0) + info([8], 0, 32) + bytes(96), tensors=2), "appears t"),
    "gguf with a gap": (partial(gguf_made, rest=info([8], 0, 64) + bytes(200), tensors=1), "leaves a gap before it"),
    "gguf with an infinite scale": (gguf_scale, "mlp.up_proj.weight: has scales that are not finite; the file is dam"),
    "gguf of two ternary scales": (partial(gguf_ternary, head_scale=1.0), "its blocks have different scales; wanted"),
    "gguf half ternary": (partial(gguf_ternary, dense=("ffn_up",)), "up_proj.weight is not; models of both are not"),
    "gguf alignment of 3": (partial(gguf, metadata={"general.alignment": 3}), "general.alignment is 3"),
    "gguf without sizes": (partial(gguf, arch="qwen2"), "qwen2.attention.head_count is missing"),
    "gguf of an adapter": (partial(gguf, metadata={"general.type": "adapter"}), "(pass an adapter with --adapter"),
    "gguf in parts": (partial(gguf, metadata={"split.count": 4}), "is one part of a split model"),
    "gguf with a window": (partial(gguf, metadata={"attention.sliding_window": 64}), "(sliding_window) is not support"),
    "gguf key missing": (partial(gguf, metadata={"block_count": None}), "llama.block_count is missing"),
    "gguf size of a word": (partial(gguf, metadata={"block_count": "two"}), "llama.block_count is 'two'"),
    "gguf eps missing": (partial(gguf, metadata={"attention.layer_norm_rms_epsilon": None}), "rms_epsilon is missing"),
    "gguf eps of a word": (partial(gguf, metadata={"attention.layer_norm_rms_epsilon": "x"}), "wanted a finite number"),
    "gguf with partial RoPE": (partial(gguf, metadata={"rope.dimension_count": 8}), "differs from the head size 16"),
    "gguf without an embedding": (partial(gguf, skip=(EMBEDDING,)), "token_embd.weight is missing"),
    "gguf tensor missing": (partial(gguf, skip=(NORM,)), f"1 tensor ({NORM}) missing"),
    "gguf of another width": (partial(gguf, metadata={"feed_forward_length": 128}), "the metadata wants [128, 64]"),
    "gguf frequencies below 0": (partial(gguf, extra={"rope_freqs.weight": -np.ones(8, np.float32)}), "vector of pos"),
    "gguf frequencies too many": (partial(gguf, extra={"rope_freqs.weight": np.ones(9, np.float32)}), "9 RoPE frequen"),
    "gguf end token of a word": (partial(gguf, metadata={"tokenizer.ggml.eos_token_id": "x"}), "eos_token_id is 'x'"),
    "gguf template of a number": (text({}, metadata={"tokenizer.chat_template": 7}), "chat_template is 7"),
    "gguf token beyond the embedding": (partial(gguf, words={}, data=json.dumps({"text": backend().decode([325])})),
                                        "d.jsonl, line 1: token"),
    "gguf tokenizer unknown": (text({"model": "rwkv"}), "tokenizer.ggml.model 'rwkv' is not supported"),
    "gguf pre-tokenizer unknown": (text({"pre": "bloom"}), "tokenizer.ggml.pre 'bloom' is not supported"),
    "gguf merge of one": (text({"merges": ["ab"]}), "merge 'ab' in tokenizer.ggml.merges is not a pair"),
    "gguf merge of unknown tokens": (text({"merges": ["zq qz"]}), "not a valid tokenizer"),
    "gguf token twice": (text(NO_IDS | {"tokens": ["a", "a"], "token_type": [1, 1]}), "appears twice"),
    "gguf BOS outside": (text({"bos_token_id": 9999}), "bos_token_id 9999 is outside the vocabulary"),
    "gguf unknown outside": (text({"unknown_token_id": 9999}), "unknown_token_id 9999 is outside the vocabulary"),
    "gguf of too many layers": (partial(gguf, metadata={"block_count": 5000}), "num_hidden_layers is 5000; wanted"),
    "gguf of a head too large": (partial(gguf, metadata={"attention.key_length": 1024, "attention.value_length": 1024,
                                                           "rope.dimension_count": 1024}),
                                 "head_dim is 1024; wanted a whole number from 1 to 512"),
    "gguf without tokens": (text({"tokens": None}), "tokenizer.ggml.tokens is missing or not a list"),
    "gguf too few token types": (text({"token_type": [1]}), "token_type is not a list of"),
    "gguf flag of a word": (text({"add_bos_token": "yes"}), "add_bos_token is 'yes'; wanted true or false"),
    "gguf spaces removed": (text(SPACES), "remove_extra_whitespaces is not supported"),
}  # fmt: skip


GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
STATE = f"{GATE}.{test_bitsandbytes.STATE}"


def nf4(edit=lambda tensors: None, **state):
    return lambda folder: evaluate(folder, test_bitsandbytes.nf4_folder(folder / "m", edit, **state))


def replaced(name, value):
    return nf4(lambda tensors: tensors.update({name: np.asarray(value)}))


def broken_rows(tensors):
    tensors |= test_bitsandbytes.nf4_tensors(DOWN, np.ones(tensors[DOWN].shape, np.float32))


NF4 = {
    "nf4 of other blocks": (nf4(blocksize=128), "blocksize is 128 in its quant_state; wanted 64"),
    "nf4 of broken rows": (nf4(broken_rows), "rows of 160 are not whole blocks of 64"),
    "nf4 without scales": (nf4(lambda t: t.pop(f"{GATE}.absmax")), "its absmax are missing; wanted 160 values of F32"),
    "nf4 without a state": (replaced(STATE, np.frombuffer(b"[]", np.uint8)), "wanted a JSON object in bytes"),
    "nf4 half nested": (replaced(f"{GATE}.nested_absmax", np.ones(1, np.float32)), "nested_blocksize or nested_offset"),
    "nf4 of other levels": (replaced(f"{GATE}.quant_map", np.ones(16, np.float32)), "its quant_map is not that of NF4"),
    "nf4 of infinite scales": (replaced(f"{GATE}.absmax", np.full(160, np.inf, np.float32)), "has scales that are not"),
}  # fmt: skip


def tokenizer(folder, data='{"text": "Hello"}\n', raw=None, template=None, words=None, **config):
    model = copy_of(DENSE, folder)
    (model / "tokenizer.json").write_text(json.dumps(words) if words else backend().to_str())
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    if raw is not None:
        (model / "tokenizer.json").write_bytes(raw)
    if template is not None:
        (model / "chat_template.jinja").write_bytes(template)
    (folder / "d.jsonl").write_text(data)
    return evaluate(folder, model, data=folder / "d.jsonl")


def chat(**options):
    return partial(tokenizer, data='{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
                                   '"b"}]}\n', **options)  # fmt: skip


TOKENIZER = {
    "text without a tokenizer": (lambda t: evaluate(t, DENSE, data=_text(t)), "no tokenizer.json; save one there with"),
    "empty tokenizer": (partial(tokenizer, raw=b"{}"), "not a valid tokenizer"),
    "special token of a number": (partial(tokenizer, bos_token=7), "bos_token is 7; wanted a string"),
    "end token beyond the embedding": (partial(tokenizer, eos_token="<end>"), "d.jsonl, line 1: token '<end>' has the"
                                       " id 326, but the model's embedding has 320 rows"),
    "added token beyond the embedding": (partial(tokenizer, data='{"text": "a<x>"}\n', extra_special_tokens=["<x>"]),
                                         "line 1: token '<x>' has the id 326"),
    "added token of a number": (partial(tokenizer, added_tokens_decoder={"1": 3}), "added_tokens_decoder is 3; wanted"),
    "added tokens of a list": (partial(tokenizer, added_tokens_decoder=[]), "wanted an object of tokens by id"),
    "extra tokens of a number": (partial(tokenizer, extra_special_tokens=3), "wanted a list of tokens"),
    "no EOS token": (partial(tokenizer, eos_token=None), "no EOS token, so a document cannot be ended"),
    "half a surrogate pair": (partial(tokenizer, data='{"text": "\\ud800"}\n'), "it contains half a surrogate pair"),
    "template of a number": (partial(tokenizer, chat_template=7), "chat_template is 7"),
    "template that is not UTF-8": (chat(template=b"\xff"), "chat_template.jinja: not UTF-8"),
    "template too long": (chat(template=b"a" * 100_000), "the chat template has 100,000 characters"),
    "invalid template": (chat(template=b"{% for"), "the chat template is not valid Jinja: line 1"),
    "template too deep": (chat(template=b"{{ " + b"(" * 5000), "the chat template cannot be compiled"),
    "template that refuses": (chat(template=b"{{ raise_exception('no users here') }}"), "line 1: the chat template re"),
    "template without bounds": (chat(template=b"{{ messages[0].content * 10 ** 10 }}"),
                                "was stopped: rendering the chat template took more than 640 MiB of memory"),
    "template that hides a turn": (chat(template=b"{{ messages[0].content }}"), "hides messages[1] (assist"),
    "no template": (chat(), "the data is conversations, but the model has no chat template"),
}  # fmt: skip


def _text(folder):
    (folder / "t.jsonl").write_text('{"text": "Hello"}\n')
    return folder / "t.jsonl"


def bitnet(folder, *options, edit=lambda raw: raw, tokenizer=True, **keys):
    path = bitnet_gguf.write_bitnet(folder / "m.gguf", tokenizer=tokenizer, **keys)
    path.write_bytes(edit(path.read_bytes()))
    return [*evaluate(folder, path), *(word for option in options for word in ("--model-option", option))]


BITNET = {
    "bitnet without its activation": (partial(bitnet, arch="bitnet"), "its metadata has no bitnet.hidden_act"),
    "bitnet of another activation": (partial(bitnet, arch="bitnet", hidden_act="gelu"), "(act) 'gelu' is not"),
    "i2_s of a layout that no loss tells": (bitnet, "in each (x86 "),
    "i2_s without a tokenizer": (partial(bitnet, tokenizer=False), "and no tokenizer, which trying them needs"),
    "i2_s of TL2": (partial(bitnet, number=39), "has bitnet.cpp's type TL2, which is not supp"),
    "an option without a value": (lambda t: bitnet(t, "relu2"), "--model-option relu2: wanted KEY=VALUE, such as"),
    "an option twice": (lambda t: bitnet(t, "hidden_act=relu2", "hidden_act=silu"), "hidden_act is also set to relu2"),
    "an option unknown": (lambda t: bitnet(t, "rope_theta=1"), "'rope_theta' is not supported; wanted hidden"),
    "an option of another value": (lambda t: bitnet(t, "i2_s_layout=tl1"), "is 'tl1'; wanted x86, x86_rows or arm"),
    "an option that no file needs": (lambda t: [*evaluate(t), "--model-option", "i2_s_layout=x86"], "no tensor is of"),
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj."


def packed(form, edit=lambda tensors: None, *changes, **keys):
    """A model of a quantized format; changes: settings in its quantization_config, for compressed-tensors also of its
    group and of the group's weights; keys: of config.json."""

    def build(folder):
        config = json.loads(json.dumps(DECLARED[form]))
        settings = config["quantization_config"]
        places = [settings]
        if form == "compressed-tensors":
            group = settings["config_groups"]["group_0"]
            places += [group, group["weights"]]
        for place, keys_of_it in zip(places, changes, strict=False):
            place |= keys_of_it
        write_packed(folder / "m", form, edit, config | keys)
        return evaluate(folder, folder / "m")

    return build


def part(name, value):
    return lambda tensors: tensors.update({Q + name: np.asarray(value)})


def none(tensors):
    pass


PACKED = {
    "mlx of three bits": (packed("mlx", part("weight", np.zeros((64, 6), np.uint32))), "3 bits in groups of 32 are"),
    "mlx of small groups": (packed("mlx", part("scales", np.ones((64, 4), np.float16))), "4 bits in groups of 16 are"),
    "mlx of another mode": (packed("mlx", quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}), "mode 'mxfp4'"),
    "mlx without biases": (packed("mlx", lambda t: t.pop(Q + "biases")), "its biases is missing; wanted BF16"),
    "mlx of vectors": (packed("mlx", part("scales", np.ones(2, np.float16))), "its scales is F16 [2]; wanted a matrix"),
    "mlx of nothing": (lambda t: config(t, quantization={"group_size": 64, "bits": 4}), "declares mlx, but no tensor"),
    "a quantized norm": (packed("mlx", lambda t: t.update({"model.norm.scales": np.ones(2, np.float16)})),
                         "model.norm.weight is quantized; wanted a tensor of shape [64]"),
    "mlx of infinite scales": (packed("mlx", part("scales", np.full((64, 2), np.inf, np.float16))),
                               "has scales that are not finite; the file is damaged"),
    "gptq of three bits": (packed("gptq", none, {"bits": 3}), "bits 3 is not supported, wanted 4 or 8; use"),
    "gptq for a kernel": (packed("gptq", none, {"checkpoint_format": "marlin"}), "checkpoint_format 'marlin' is not"),
    "gptq in another order": (packed("gptq", part("g_idx", np.arange(64, dtype=np.int32)[::-1].copy() // 32)),
                              "its columns are grouped in another order (g_idx), as desc_act: true"),
    "awq for a kernel": (packed("awq", none, {"version": "gemv"}), "version 'gemv' is not supported, wanted gemm"),
    "compressed-tensors of fp8": (packed("compressed-tensors", none, {"format": "float-quantized"}), "'float-quant"),
    "compressed-tensors of floats": (packed("compressed-tensors", none, {}, {}, {"type": "float"}), "type 'float' is"),
    "compressed-tensors of int8 rows": (packed("compressed-tensors", none, {}, {"input_activations": {"num_bits": 8}}),
                                        "input_activations are quantized; this is not supported"),
    "compressed-tensors of no groups": (packed("compressed-tensors", none, {"config_groups": [1]}), "config_groups is"),
    "compressed-tensors of no weights": (packed("compressed-tensors", none, {}, {"weights": None}), "weights is None"),
    "compressed-tensors in order": (packed("compressed-tensors", part("weight_g_idx", np.zeros(64, np.int32))),
                                    "actorder group (weight_g_idx) is not supported"),
}  # fmt: skip
CASES = HF | GGUF | NF4 | PACKED | BITNET | TOKENIZER
