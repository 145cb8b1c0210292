"""The files of a tokenizer, as transformers reads them."""

import json
from pathlib import Path

from lorawgpu.errors import CheckFailed
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.run_folder import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import TOOL_USE

PROBE = "Hello, world! 1234 naïve café\n\n  def f(x): return x**2  # 日本語 <|im_end|>"


def save_tokenizer(folder: Path, tokenizer: GuardedTokenizer, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, read them back and compare on a probe text.

    longest: the model's context. CheckFailed if the tokenizer differs when read back.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    if tokenizer.tool_use_template is not None:
        both = {"default": tokenizer.chat_template, TOOL_USE: tokenizer.tool_use_template}
        config["chat_template"] = [{"name": name, "template": template} for name, template in both.items()]
    replace_file(folder / TOKENIZER_FILE, tokenizer.to_json().encode())
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    replace_file(folder / TOKENIZER_CONFIG_FILE, text.encode())
    again = GuardedTokenizer.from_hf_folder(folder)
    for special in (False, True):
        if again.encode(PROBE, add_special=special) != tokenizer.encode(PROBE, add_special=special):
            raise CheckFailed(f"{folder}, read back: the tokenizer encodes text in another way")
    if (again.special_tokens, again.chat_template) != (tokenizer.special_tokens, tokenizer.chat_template):
        raise CheckFailed(f"{folder}, read back: the tokenizer has different special tokens or another chat template")
