"""A small byte-level BPE tokenizer for tests: control tokens of several families, and merges across borders."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from lorawgpu.tokenizer.hf import Tokenizer

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
           "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|endoftext|>"]  # fmt: skip
CORPUS = ["Assistant: Yes, the answer is 42.\n\nUser: And then?\n", "[INST] Hello there [/INST] General, naïve café.\n"]


@cache
def backend() -> tokenizers.Tokenizer:
    out = tokenizers.Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in CONTROL],
    )  # fmt: skip
    out.train_from_iterator(CORPUS * 50, trainer)
    return out


def tiny_tokenizer(add_bos=False, eos="</s>", chat_template=None) -> Tokenizer:
    out = tokenizers.Tokenizer.from_str(backend().to_str())
    if add_bos:
        out.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(out, {"bos_token": "<s>", "eos_token": eos}, chat_template, "tiny tokenizer")
