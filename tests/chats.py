"""Conversations encoded with the tiny tokenizer, and the text of their target tokens."""

import json
from datetime import datetime

from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.encode import Encoder, EncodeSettings


def encoder(template, roles=("assistant",), train_on_inputs=False, add_bos=False, sequence_len=4096):
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    source = BUILT_IN.get(template, template)
    chat = ChatTemplate(source, tokenizer.special_tokens, now=datetime(2024, 7, 26))
    return Encoder("chat", EncodeSettings(sequence_len, "truncate", train_on_inputs, roles), tokenizer, chat)


def encode(template, messages, tools=None, **options):
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    return encoder(template, **options)("chat.jsonl", 7, json.dumps(record).encode()).sample


def runs(sample):
    """The text of each unbroken run of target tokens."""
    return target_runs(tiny_tokenizer(), sample)


def target_runs(tokenizer, sample):
    """The same with another tokenizer."""
    out, at = [], None
    for i, label in enumerate(sample.labels.tolist()):
        if label == IGNORE:
            continue
        assert label == sample.input_ids[i]
        if at == i - 1:
            out[-1].append(label)
        else:
            out.append([label])
        at = i
    return [tokenizer.decode(run) for run in out]


def turns(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % len(roles)], "content": c} for i, c in enumerate(contents)]
