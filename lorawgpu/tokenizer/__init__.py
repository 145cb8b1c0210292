"""Tokenizers, from `tokenizer.json` or from a GGUF."""
