"""Text to token ids and back with the `tokenizers` library, from a Hugging Face folder or GGUF metadata."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE, TOOL_USE_FILE
from lorawgpu.files.untrusted import brief, decoded, read_bytes, read_json_object
from lorawgpu.guard import doing
from lorawgpu.guard.limits import DECODING, TOKENIZING
from lorawgpu.tokenizer.added_tokens import SPECIAL_TOKENS, add_declared, extended
from lorawgpu.tokenizer.gguf import backend_from_gguf, bos_eos_processor, user_errors

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

SPACE_BYTE = "\u0120"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
MAX_TOKENIZER = 64 << 20  # bytes; the largest published tokenizer.json is about 35 MB
MAX_TEMPLATE = 1 << 20  # bytes
TOOL_USE = "tool_use"  # the name of a template for conversations with tools


def _bytes_by_character() -> dict[str, bytes]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): bytes([byte]) for byte in plain}
    return spelled | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


BYTES = _bytes_by_character()


class Tokenizer:
    """The tokenizer of a model.

    `special_tokens`: the special tokens by the names that templates use (`bos_token`, ...); `chat_template`: the
    model's own Jinja template, or None, and `tool_use_template` the one for conversations with tools, if it has one;
    `add_bos`: whether the tokenizer adds BOS by itself. `rows`: of the model's embedding, None if unknown; text that
    becomes an id beyond them is refused.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None,
        source: str,
        rows: int | None = None,
        tool_use_template: str | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._rows: int | None = None
        self._plain: tokenizers.Tokenizer | None = None
        self.source = source
        self.chat_template, self.tool_use_template = chat_template, tool_use_template
        self._name_special_tokens(special_tokens)
        if rows is not None and max(backend.get_vocab().values(), default=0) >= rows:
            self._rows = rows  # else there is nothing to check

    @classmethod
    def from_hf_folder(cls, folder: Path, rows: int | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` if they exist.

        UserError if there is no tokenizer.json, or any of them is invalid.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder}: no tokenizer.json; save one there with transformers' save_pretrained.")
        config_path, older = Path(folder) / "tokenizer_config.json", Path(folder) / "special_tokens_map.json"
        config = _optional_json(config_path)
        _special_tokens(config, str(config_path))  # so that an error names the right file
        named = _special_tokens(everything := {**_optional_json(older), **config}, str(older))
        backend = _load(path)
        with user_errors(str(config_path)):
            add_declared(backend, everything, _optional_json(Path(folder) / "added_tokens.json"), str(config_path))
        gemma = _is_gemma(Path(folder))
        if gemma or "add_bos_token" in config or "add_eos_token" in config:  # as transformers, which replaces it
            bos = named.get("bos_token") if gemma or config.get("add_bos_token") else None
            eos = named.get("eos_token") if config.get("add_eos_token") else None
            backend.post_processor = bos_eos_processor(backend, bos, eos)
        templates = _chat_templates(Path(folder), config)
        return cls(backend, named, templates.get("default"), str(path), rows, templates.get(TOOL_USE))

    @classmethod
    def from_gguf(cls, file: "GgufFile", rows: int | None = None) -> "Tokenizer":
        """Rebuild the tokenizer from GGUF metadata. UserError if it is not supported."""
        backend, named = backend_from_gguf(file)
        keys = ("tokenizer.chat_template", f"tokenizer.chat_template.{TOOL_USE}")
        templates = [file.metadata.get(key) for key in keys]
        for key, template in zip(keys, templates, strict=True):
            if template is not None and not isinstance(template, str):
                raise UserError(f"{file.path}: {key} is {brief(template)}; wanted a string.")
        return cls(backend, named, templates[0], str(file.path), rows, templates[1])

    def with_added(self, tokens: Sequence[str], overrides: Mapping[int, str], rows: int | None = None) -> "Tokenizer":
        """The same tokenizer with more tokens, and with other spellings of added ones, by id.

        rows: of the model's embedding, which grows by those of the new tokens. UserError as `added_tokens.extended`.
        """
        with user_errors(self.source):
            backend = extended(self._backend, tokens, overrides, self.source)
        old = {self.token(number): text for number, text in overrides.items()}
        named = {name: old.get(token, token) for name, token in self.special_tokens.items()}
        ids = [backend.token_to_id(token) for token in tokens]
        rows = None if rows is None else max(rows, *(i + 1 for i in ids), 0)
        return Tokenizer(backend, named, self.chat_template, self.source, rows, self.tool_use_template)

    def with_special_tokens(self, tokens: dict[str, str]) -> "Tokenizer":
        """The same tokenizer with other special tokens by name. UserError for one that is not in the vocabulary."""
        for name, token in tokens.items():
            if self.token_id(token) is None:
                raise UserError(
                    f"special_tokens: {name} {brief(token)} is not in the vocabulary of {self.source}, and a new token "
                    "would need a trained embedding; choose a token that is there, or add it to `tokens` too"
                )
        if not tokens:
            return self
        other, added = copy(self), self.added_ids
        plain = [token for token in tokens.values() if self.token_id(token) not in added]
        if plain:  # until now their spelling was split
            other._backend, other._plain = tokenizers.Tokenizer.from_str(self._backend.to_str()), None
            other._backend.add_special_tokens(plain)
        other._name_special_tokens(self.special_tokens | tokens)
        return other

    def _name_special_tokens(self, tokens: dict[str, str]) -> None:
        self.special_tokens = tokens
        self.bos_id, self.eos_id = self._special_id("bos_token"), self._special_id("eos_token")
        self.add_bos = self.bos_id is not None and self.encode("", add_special=True)[:1] == [self.bos_id]

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self._backend.get_vocab_size()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which ordinary text never becomes."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that are matched as a whole, the control tokens among them."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @property
    def digest(self) -> str:
        """A hash of everything that affects the ids, for the key of the token cache."""
        return hashlib.blake2b(f"{self._backend.to_str()} {self.bos_id} {self.eos_id}".encode()).hexdigest()

    def to_json(self) -> str:
        """The contents of tokenizer.json, which lacks the names of the special tokens and the chat template."""
        return self._backend.to_str(pretty=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token, None if there is no such token."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The spelling of a token, None if there is no such id."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that a token stands for, which may be part of a character. b"" if there is no such id."""
        token = self.token(token_id) or ""
        if token_id in self._whole:
            return token.encode()
        if self._in_bytes:
            return b"".join(BYTES[c] if c in BYTES else c.encode() for c in token)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    @cached_property
    def _whole(self) -> frozenset[int]:
        return self.added_ids

    @cached_property
    def _in_bytes(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of bytes."""
        space = self.token_id(SPACE_BYTE)
        return space is not None and self.decode([space]) == " "

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS as the tokenizer is configured. `parse_special=False` reads the spelling of
        a control token (`<|im_end|>` in user input) as ordinary text. UserError for half a surrogate pair, and for
        an id beyond the rows of the embedding.
        """
        return self.encoding(text, add_special, parse_special).ids

    def document(self, text: str) -> list[int]:
        """Ids of text at the beginning of a document: BOS, if the tokenizer adds one, also where the text spells it."""
        ids = self.encode(text, add_special=True)
        return ids[self.second_bos(ids) :]

    def second_bos(self, ids: Sequence[int]) -> int:
        """How many ids at the start are a BOS before the one that the text spells out."""
        return int(len(ids) > 1 and self.bos_id is not None and ids[0] == ids[1] == self.bos_id)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD, unknown ids become nothing."""
        doing(DECODING)
        try:
            return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise UserError(f"{self.source}: token ids cannot be decoded: {brief(str(error))}") from None

    def encoding(self, text: str, add_special: bool = False, parse_special: bool = True) -> tokenizers.Encoding:
        """The library's encoding of `text`. Read only the fields you need: each is copied, which can double the time.

        `offsets`: the characters `[start, end)` of `text` that each token covers, spaces included. Tokens that share
        one multi-byte character all cover it; tokens added by `add_special` cover (0, 0).
        """
        backend = self._backend if parse_special else self._without_special()
        before = doing(TOKENIZING)
        try:
            encoding = backend.encode(text, add_special_tokens=add_special)
        except (UnicodeEncodeError, TypeError):
            raise UserError(f"{brief(text)} cannot be tokenized: it contains half a surrogate pair.") from None
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise UserError(f"{self.source}: {brief(text)} cannot be tokenized: {brief(str(error))}") from None
        doing(before)
        if self._rows is not None:
            self.check_rows(encoding.ids)
        return encoding

    def check_rows(self, ids: Sequence[int]) -> None:
        """UserError, naming the first one, if there are ids beyond the rows of the model's embedding."""
        beyond = None if self._rows is None else next((i for i in ids if i >= self._rows), None)
        if beyond is not None:
            raise UserError(
                f"token {brief(self.token(beyond))} has the id {beyond}, but the model's embedding has "
                f"{self._rows} rows: {self.source} has tokens that the model lacks. Use the tokenizer that the model "
                "came with, a model whose embedding was resized to it, or text without this token"
            )

    def _without_special(self) -> tokenizers.Tokenizer:
        """A second backend that reads control tokens as text; switching the first one would not be thread-safe."""
        if self._plain is None:
            with user_errors(self.source):  # the library cannot always read back what it wrote
                self._plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
            self._plain.encode_special_tokens = True
        return self._plain

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def _load(path: Path) -> tokenizers.Tokenizer:
    text = read_bytes(path, MAX_TOKENIZER)
    with user_errors(str(path)):
        data = json.loads(text)
        _keep_spaces_in_offsets(data.get("post_processor"))
        return tokenizers.Tokenizer.from_str(json.dumps(data))


def _keep_spaces_in_offsets(post_processor: object) -> None:
    """Stop byte-level post-processors from trimming a token's leading space off its offsets: loss masks need it."""
    if isinstance(post_processor, dict):
        if "trim_offsets" in post_processor:
            post_processor["trim_offsets"] = False
        for processor in post_processor.get("processors") or []:
            _keep_spaces_in_offsets(processor)


def _is_gemma(folder: Path) -> bool:
    """Whether it is one of the Gemmas: none works without BOS, but Gemma 4 leaves it to the chat template."""
    return str(_optional_json(folder / "config.json").get("model_type")).startswith("gemma")


def _optional_json(path: Path) -> dict:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(config: dict, source: str) -> dict[str, str]:
    """The special tokens by name; a file may give one as an object with `content`."""
    named = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise UserError(f"{source}: {name} is {brief(value)}; wanted a string.")
        if value:
            named[name] = value
    return named


def _chat_templates(folder: Path, config: dict) -> dict[str, str]:
    """The templates by name. `chat_template.jinja`, and files in a folder of more of them, win over
    `tokenizer_config.json`, where a single template is called `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template if _is_named(item)}
    elif not isinstance(template, dict):
        template = {} if template is None else {"default": template}
    templates = {name: template[name] for name in ("default", TOOL_USE) if template.get(name) is not None}
    for source in templates.values():
        if not isinstance(source, str):
            path = folder / "tokenizer_config.json"
            raise UserError(f"{path}: chat_template is {brief(source)}; wanted a string.")
    files = {"default": folder / CHAT_TEMPLATE_FILE, TOOL_USE: folder / TOOL_USE_FILE}
    read = {name: _text(path) for name, path in files.items() if path.is_file()}
    return read if "default" in read else templates | read


def _is_named(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str)


def _text(path: Path) -> str:
    try:
        return decoded(read_bytes(path, MAX_TEMPLATE))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}.") from None
