"""Make the training text of `builtin:tiny-bitnet` and the chat data `builtin:docstrings` from Python's documentation.

    python scripts/tiny_corpus.py --docs FOLDER --out out/tiny

FOLDER holds Python's documentation as HTML (Debian: `apt-get download python3.11-doc`, then `dpkg -x`; elsewhere the
HTML archive of docs.python.org). The docstrings are those of the standard library that runs this script, parsed and
never imported. Both are under the Python Software Foundation's license.

Output: a byte-level BPE tokenizer with BitNet's control tokens and chat template (`model/`), the training tokens
(`train.bin`, uint16), the held-out passages as pre-tokenized samples (`heldout.jsonl`), and the chat set
(`docstrings.jsonl`, `docstrings-heldout.jsonl`). Whole modules are held out, the same in all of these: no page or
docstring of a held-out module is trained on.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import tokenizers
from make_docstring_data import documented, first_paragraph, is_held_out, parsed_modules
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2560
CONTEXT = 512
HELD_OUT = 0.05  # fraction of modules
BOS, EOS, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
# As in Llama 3, whose tokenizer BitNet-b1.58-2B-4T uses: control tokens after text tokens, words split by this pattern
CONTROL = (BOS, EOS, "<|start_header_id|>", "<|end_header_id|>", END_OF_TURN)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% set content = message['role'] | capitalize + ': ' + message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
BLOCKS = frozenset("p dt dd li tr h1 h2 h3 h4 h5 h6 div".split())
SKIPPED = frozenset("pre script style table".split())  # English only, no programs
LEFT_OUT = re.compile(r"genindex|search|contents|download|py-modindex|changelog|_static")
VERBS = frozenset(
    "Return Set Get Create Read Add Parse Test Send Remove Write Run Format Print Convert Open Find Close Make "
    "Handle Encode Generate Construct Log Decode Delete Produce Copy Check Register Start Wait Determine Stop "
    "Extract Retrieve Execute Receive Guess Compute Call Clear Connect Mark Reset Put Change Push Override Flush "
    "Invoke Insert Move Split Configure Compile Compare Translate Perform Turn Load Resolve Expand Bind Schedule "
    "Wrap Install Display Walk Take Report Escape Pop Yield Wake Acquire Release Indicate Request Dump Iterate "
    "Update Feed Decide Arrange Block Accept Compress Decompress Scan Skip".split()
)
MIN_PASSAGE = 60  # characters; shorter passages are dropped


class Page(HTMLParser):
    """The English text of one page of Sphinx HTML: `passages`, one per section, with a line per paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.passages: list[str] = []
        self._line, self._lines = "", []
        self._depth = 0  # nesting of div elements inside the body; 0 is outside
        self._skipping = ""  # the element whose contents are skipped
        self._nested = 0  # how many of these elements are open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping:
            self._nested += tag == self._skipping
        elif tag == "div" and (self._depth or ("role", "main") in attrs):
            self._depth += 1
        if not self._depth or self._skipping:
            return
        if tag in SKIPPED or ("class", "headerlink") in attrs:
            self._skipping, self._nested = tag, 1
        elif tag == "section":
            self._end_passage()
        if tag in BLOCKS:
            self._end_line()

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            self._nested -= tag == self._skipping
            self._skipping = self._skipping if self._nested else ""
            return
        if tag in BLOCKS:
            self._end_line()
        if tag == "section":
            self._end_passage()
        self._depth -= tag == "div" and self._depth > 0

    def handle_data(self, data: str) -> None:
        if self._depth and not self._skipping:
            self._line += data

    def _end_line(self) -> None:
        line = " ".join(self._line.split())
        if line and not line.startswith("Source code:"):
            self._lines.append(line)
        self._line = ""

    def _end_passage(self) -> None:
        self._end_line()
        text = "\n".join(self._lines)
        if len(text) >= MIN_PASSAGE:
            self.passages.append(text)
        self._lines = []


def documentation(folder: Path) -> Iterator[tuple[bool, str]]:
    """(held out?, passage) for every page of Python's HTML documentation, sorted by page name."""
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if not LEFT_OUT.search(name):
            page = Page()
            page.feed(path.read_text("utf-8"))
            held_out = is_held_out(name.removeprefix("library/"), HELD_OUT)
            yield from ((held_out, plain(passage)) for passage in page.passages)


def plain(text: str) -> str:
    """Replace typographic quotes and dashes by ASCII, to spare the small vocabulary."""
    for fancy, ascii_text in {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "–": "-",
        "—": "-",
        "…": "...",
        "\xa0": " ",
    }.items():
        text = text.replace(fancy, ascii_text)
    return text


def docstrings() -> Iterator[tuple[bool, str, str]]:
    """(held out?, signature, docstring) for everything documented in the standard library, each docstring once."""
    seen = set()
    for module, tree in parsed_modules():
        for signature, docstring in documented(module, tree):
            if docstring not in seen:
                seen.add(docstring)
                yield is_held_out(module, HELD_OUT), signature, docstring


def chat(signature: str, docstring: str) -> dict | None:
    """One record of `builtin:docstrings`; None if the docstring does not begin with a short imperative sentence.

    The style is fixed: what the function is for, then what it takes. The corpus has no text in this style.
    """
    name, _, arguments = signature.partition("(")
    sentence = re.match(r"(\w+)( [\w ,'()/*-]{8,100})\.?(?= [A-Z]|$)", first_paragraph(docstring) or "")
    if not arguments or len(signature) > 90 or not sentence or sentence[1].removesuffix("s") not in VERBS:
        return None
    verb = sentence[1].removesuffix("s").lower()
    parsed = ast.parse(f"def f({arguments}: pass").body[0].args
    names = [argument.arg for argument in ast.walk(parsed) if isinstance(argument, ast.arg)]
    takes = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else (names or ["no arguments"])[0]
    answer = f"Use {name.rpartition('.')[2]} to {verb}{sentence[2]}. It takes {takes}."
    turns = [("user", f"What does {signature} do?"), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE like Llama 3's: every byte is a token, control tokens come last, BOS is prepended."""
    out = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    out.decoder = decoders.ByteLevel()
    size = VOCABULARY - len(CONTROL)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    out.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    out.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    bos = [(BOS, out.token_to_id(BOS))]
    out.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=bos)
    return out


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with its control tokens and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


def samples(ids: list[int]) -> Iterator[dict]:
    """A held-out passage as pre-tokenized records, no longer than the context."""
    for start in range(0, len(ids) - 1, CONTEXT):  # a single remaining token has no target
        piece = ids[start : start + CONTEXT]
        if len(piece) > 1:
            yield {"input_ids": piece, "labels": piece}


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=Path, required=True, help="folder of Python's HTML documentation")
    parser.add_argument("--out", type=Path, default=Path("out/tiny"))
    options = parser.parse_args()
    entries = list(docstrings())
    passages = [(held_out, text, EOS) for held_out, text in documentation(options.docs)]
    # docstrings end like chat turns, so that the base learns END_OF_TURN, which an adapter could not teach it
    passages += [(held_out, plain(f"{signature}\n{text}"), END_OF_TURN) for held_out, signature, text in entries]
    if len(passages) < 2 * len(entries) / 3 + len(entries):
        raise SystemExit(f"error: {options.docs} has too few pages; wanted Python's HTML documentation")
    tokenizer = train_tokenizer([text for held_out, text, _ in passages if not held_out])
    save_tokenizer(tokenizer, options.out / "model")
    encoded = [(h, [*tokenizer.encode(text).ids, tokenizer.token_to_id(end)]) for h, text, end in passages]
    train = [ids for held_out, ids in encoded if not held_out]
    order = np.random.Generator(np.random.Philox(0)).permutation(len(train))
    np.concatenate([train[i] for i in order]).astype(np.uint16).tofile(options.out / "train.bin")
    held = [record for held_out, ids in encoded if held_out for record in samples(ids)]
    write_jsonl(options.out / "heldout.jsonl", held)
    for part, name in ((False, "docstrings"), (True, "docstrings-heldout")):
        chats = [chat(signature, text) for held_out, signature, text in entries if held_out == part]
        write_jsonl(options.out / f"{name}.jsonl", [record for record in chats if record])
    size = sum(len(text) for held_out, text, _ in passages if not held_out)
    print(f"{size / 1e6:.1f} million characters, {sum(map(len, train)) / 1e6:.2f} million tokens to train on")
    print(f"{sum(len(record['input_ids']) for record in held)} tokens in {len(held)} held-out samples")


if __name__ == "__main__":
    main()
