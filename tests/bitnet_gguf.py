"""The packed BitNet golden case as GGUF files of bitnet.cpp and llama.cpp."""

import json
import struct

import gguf
import numpy as np
from family_gguf import add_tokenizer
from golden_case import GOLDEN

from lorawgpu.weights.loader import open_checkpoint

CASE = GOLDEN / "bitnet_packed"
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm",
}  # fmt: skip


def i2_s_byte_and_bits(layout, index, columns):
    """Where element `index` of a matrix lies: its byte, and the lowest bit there. One element at a time."""
    if layout == "x86_rows":
        row, column = divmod(index, columns)
        return row // 4 * columns + column, 6 - 2 * (row % 4)
    run = {"x86": 128, "arm": 64}[layout]
    block, j = divmod(index, run)
    return block * run // 4 + j % (run // 4), 6 - 2 * (j // (run // 4))


def i2_s(values, scale, layout):
    """T [N, K] as the bytes of i2_s."""
    raw = bytearray(values.size // 4 + 32)
    for index, value in enumerate(values.reshape(-1)):
        at, shift = i2_s_byte_and_bits(layout, index, values.shape[1])
        raw[at] |= int(value + 1) << shift
    raw[values.size // 4 : values.size // 4 + 4] = struct.pack("<f", scale)
    return np.frombuffer(bytes(raw), np.uint8)


def as_matrix(path, name, shape, number):
    """Give a tensor that was written as bytes [2, n] its shape and type number."""
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    struct.pack_into("<QQI", raw, at + 4, *shape[::-1], number)
    path.write_bytes(raw)


def writer_of(path, arch, config, **metadata):
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    for theirs, ours in {"bos": "bos", "eos": "eos", "padding": "pad"}.items():
        writer.add_uint32(f"tokenizer.ggml.{theirs}_token_id", config[f"{ours}_token_id"])
    for key, value in metadata.items():
        writer.add_string(f"{arch}.{key}", value)
    return writer


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bitnet(
    path, arch="bitnet-b1.58", layout="x86", own_scales=False, number=36, tokenizer=False, edit=None, own=4, **metadata
):
    """The case as i2_s, with `edit(values, scale)` of each matrix. own_scales: as tensors of four, with the rest of the
    scale in the matrix. number: of the type. tokenizer: with one."""
    base, matrices = open_checkpoint(CASE), {}
    writer = writer_of(path, arch, json.loads((CASE / "config.json").read_text()), **metadata)
    if tokenizer:
        add_tokenizer(writer, base.config.vocab_size)
    for name in base.keys():
        if name.startswith("model.layers."):
            _, _, layer, *part, kind = name.split(".")
            short = f"blk.{layer}.{PARTS['.'.join(part)]}"
        else:
            short = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}[name]
        if not name.endswith("proj.weight"):
            writer.add_tensor(f"{short}.weight", base.dense(name).float32())
            continue
        ternary = base.ternary(name)
        values, scale = ternary.values(), ternary.scale / (4 if own_scales else 1)
        values, scale = edit(values, scale) if edit else (values, scale)
        matrices[f"{short}.weight"] = values.shape
        writer.add_tensor(f"{short}.weight", i2_s(values, scale, layout).view(np.int8).reshape(2, -1))
        if own_scales:
            writer.add_tensor(f"{short}.scale", np.array([own], np.float32))
    finish(writer)
    for name, shape in matrices.items():
        as_matrix(path, name, shape, number)
    return path
