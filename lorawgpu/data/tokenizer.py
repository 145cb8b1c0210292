"""Text to token ids and back, on the `tokenizers` library."""


class Tokenizer:
    pass
