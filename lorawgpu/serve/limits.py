"""What a client may ask for; docs/limits.md lists them. Those of time, in seconds, keep a slow client from a place."""

MAX_BODY = 8 << 20  # bytes of a request
MAX_HEADERS = 64 << 10  # bytes of them
BODY_SECONDS = 30.0  # for sending it
MAX_CHOICES = 128  # answers of one request: prompts times `n`
MAX_MESSAGES = 4096  # of a conversation
MAX_TOOLS = 128
MAX_LETTERS = 256  # characters of text for each token of the context: longer prompts are not even tokenized
MAX_STOPS = 4  # stop strings
MAX_STOP = 512  # characters of one
MAX_LOGPROBS = 20  # alternatives of a token
MAX_NAME = 256  # characters of the name of a model
MAX_PATH = 4096  # characters of the path of an adapter
MAX_ADAPTERS = 32  # loaded at once
MAX_CONNECTIONS = 1024  # open at once
QUEUE = 256  # answers that wait for a place, unless --queue says how many
SEQUENCES = 32  # answered at once, unless --max-sequences says how many
CONTEXT = 4096  # tokens of a prompt and its answer, unless --context says how many
CACHE = 16384  # tokens of all of them together, unless --cache-tokens says how many
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # addresses that only this machine reaches
