"""What the work on one item may take: a conversation, a text, a record, a row, or loading a tokenizer."""

MIB = 1 << 20
STARTING, LOADING, READING, RENDERING, TOKENIZING, DECODING = range(6)  # what a worker does
WORK = ("starting", "loading it", "reading", "rendering the chat template", "tokenizing", "decoding")
SECONDS = (60.0, 15.0, 8.0, 8.0, 8.0, 8.0)  # of each kind of work, on one item
MEMORY = 640 * MIB  # bytes beyond what a worker holds once its objects are loaded
LOADING_MEMORY = 1024 * MIB  # the largest published tokenizers take half of it
MAX_REPLY = 64 * MIB  # bytes that one item may become
