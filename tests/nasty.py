"""Strings on which tokenizers disagree, and text to train small vocabularies on."""

import random

PIECES = [
    # white space
    " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", " \t ", "\u00a0",
    "\u2003", "\u3000", "\u200b", "\u2028", "\x0b", "\x0c", "\x85", " " * 7, " " * 33, "\n" * 9, "\n" * 40, "\t" * 5,
    # SentencePiece's own characters, byte fallback, control characters
    "▁", "▁▁", "▁ ▁", " ▁the", "<0x41>", "<0x0A>", "\x00", "\x01\x02", "\x1b[0m", "\x7f", "\ufeff", "\ufffd", "\uffff",
    "\U0010ffff", "\ue000",
    # digits
    "0", "7", "12", "123", "1234", "20245", "3.14159", "1,000,000", "0x1F", "1e-9", "½", "Ⅳ", "²³", "٣٤٥", "一二三",
    "१२३", "v2beta3", "x1y22z333",
    # contractions in mixed case
    "it's", "IT'S", "It'S", "don't", "DON'T", "we'll", "WE'LL", "We'Ll", "they've", "I'M", "you'Re", "he'D", "'s", "'",
    "''", "’s", "o'clock", "'ſ", "'Sam", "l'été",
    # words and case
    "the", "The", "THE", " the", "camelCase", "PascalCaseWord", "HTMLParser", "iPhone", "naïve", "café", "ǅungla",
    "straße", "STRASSE", "ﬁne", "İstanbul", " Kelvin", "xyz", "a" * 60, "ab" * 40, "Donaudampfschifffahrtsgesellschaft",
    # combining marks
    "e\u0301", "n\u0303a\u0308", "\u0301", "a\u0300\u0316\u0301b", "각", "\u1100\u1161\u11a8", "นี้", "हिन्दी", "\u20dd",
    # scripts
    "北京", "日本語のテスト", "한국어", "Привет", "ДОМ", "العربية", "עברית", "\u202eabc\u202c", "ελληνικά", "ไทย",
    "𝔘𝔫𝔦", "𐍈", "𠜎",
    # emoji
    "😀", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "❤️", "1️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    # signs and code
    ".", "...", "!?", "--", "==>", "//", "/*", "\\n", "\\", "`", "\"", "a/b", "a_b", "_", "$x", "€5", "<", ">", "<|",
    "|>", "def f(x):\n    return x\n", "{\"a\": [1, 2]}", "http://a.b/c?d=e&f", "#include <x>\n", "#\n/\n",
    "</\n\n", "x;//\n/\n",
]  # fmt: skip
# Special tokens of all families, spelled inside text, and broken ones.
SPELLED = [
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|user|>", "<|end|>", "[INST]", "[/INST]", "<tool>",
    "<think>", "</think>", "<|im_end", "im_end|>", "< s >", "<S>", "[ INST]", "<|im_end|><|im_end|>", "<|end|>\n",
    "<|end|>  ", "<s> x",
]  # fmt: skip

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1024 metres, isn't it? The end of the turn is near.\n\n",
    "def add(a, b):\n    return a + b  # 12345 67\n\n\nnaïve café, 3:45pm   \t ДОМ Привет\r\n\r\n",
    "Numbers 1 22 333 4444 55555; don't, we'll, I'D, YOU'RE, CamelCaseWords. 北京 2008年 ½ Ⅳ 日本語 日本\n",
    "हिन्दी नमस्ते, café cafe\u0301, http://a.b/c, a//b\n\n/\n, [[x]], {{y}}, <<z>>, == --> ... \n\n\n\n",
] * 20


def nasty_strings(count: int = 200) -> list[str]:
    """Deterministic: every piece alone, then random chains of them."""
    rng = random.Random(14)
    pool = PIECES + SPELLED
    out = ["", *pool]
    while len(out) < count + len(pool):
        out.append("".join(rng.choice(pool) + rng.choice(["", "", " "]) for _ in range(rng.randint(2, 9))))
    return out
