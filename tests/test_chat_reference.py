"""Token ids and labels of conversations against transformers with the same template."""

import json

import numpy as np
import pytest
from chats import turns
from test_chat import smollm2

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.encode import Encoder, EncodeSettings


@pytest.mark.reference
@pytest.mark.parametrize("name", [*sorted(BUILT_IN), "own"])
def test_ids_and_labels_equal_transformers(name):
    """300 random conversations with a real tokenizer; labels against generation markers around the same text."""
    transformers = pytest.importorskip("transformers")
    ours = smollm2()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours._backend, **ours.special_tokens)
    source = ours.chat_template if name == "own" else BUILT_IN[name]
    template = ChatTemplate(source, ours.special_tokens)
    encode_one = Encoder("chat", EncodeSettings(10**6, "raise", False, ("assistant",)), ours, template)
    rng = np.random.default_rng(0)
    words = [
        "naïve",
        "café",
        "3:45pm",
        "  ",
        "\n\n",
        "def f(x):\n    return x",
        "日本語",
        "😀",
        "User:",
        "It's",
        "2**10",
        ".",
    ]
    for number in range(300):
        count = 2 * int(rng.integers(1, 4))
        contents = [" ".join(rng.choice(words, rng.integers(1, 12))).strip() or "x" for _ in range(count)]
        messages = turns(*contents)
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        sample = encode_one("f", number, json.dumps({"messages": messages}).encode()).sample
        expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=True, return_dict=False)
        assert sample.input_ids.tolist() == expected
        assert (sample.labels != IGNORE).tolist() == _transformers_mask(theirs, name, source, messages)


def fenced(answer: str) -> str:
    """A turn's `answer`, inside generation markers if the assistant gives it."""
    marked = "{%- generation %}{{- X }}{%- endgeneration %}"
    either = "{%- if message['role'] == 'assistant' %}" + marked + "{%- else %}{{- X }}{%- endif %}"
    return either.replace("X", answer)


# Each template is edited to put markers around the answer and its end of turn, and around the space of the header
# before it: if that is a token of its own, the model has to write it.
FENCES = {
    "chatml": ("{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n",
               "{{ message['role'] + '\\n' }}" + fenced("message['content'] + '<|im_end|>'") + "{{- '\\n' }}"),
    "llama-3": (" + message['content'] | trim + '<|eot_id|>' }}",
                " }}" + fenced("message['content'] | trim + '<|eot_id|>'")),
    "bitnet": (" + ': ' + message['content'] | trim + '<|eot_id|>' }}",
               " + ':' }}" + fenced("' ' + message['content'] | trim + '<|eot_id|>'")),
    "gemma": (" + message['content'] | trim }}\n{{- '<end_of_turn>\\n' }}",
              " }}" + fenced("message['content'] | trim + '<end_of_turn>'") + "{{- '\\n' }}"),
    "mistral": ("{{- ' ' + message['content'] + eos_token }}", fenced("' ' + message['content'] + eos_token")),
    "alpaca": ("{{- '### Response:\\n' + message['content'] + eos_token }}",
               "{{- '### Response:\\n' }}" + fenced("message['content'] + eos_token")),
    "own": (" + message['content'] + '<|im_end|>' + '\n'}}",
            " }}" + fenced("message['content'] + '<|im_end|>'") + "{{- '\\n' }}"),
}  # fmt: skip


def _transformers_mask(tokenizer, name, source, messages):
    """transformers' own assistant mask."""
    old, new = FENCES[name]
    assert source.count(old) == 1
    out = tokenizer.apply_chat_template(
        messages, chat_template=source.replace(old, new), return_dict=True, return_assistant_tokens_mask=True
    )
    return [bool(m) for m in out["assistant_masks"]]
