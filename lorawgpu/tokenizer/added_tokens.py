"""Added tokens: those that a tokenizer matches before it splits anything, as declared next to its tokenizer.json."""

import json
from collections.abc import Iterator, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # lists of tokens, or objects of them by name
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def add_declared(backend: tokenizers.Tokenizer, config: dict, older: Mapping[str, object], source: str) -> None:
    """Add what `tokenizer_config.json` declares or names and `backend` does not have, as transformers does.

    A token of the vocabulary keeps its id; any other gets the next one. `older`: the contents of added_tokens.json,
    ids by token. UserError, naming the key, if an entry is not a token.
    """
    named = list(_named(config, source))
    special = {token.content for token in named}
    have = backend.get_added_tokens_decoder().values()
    unchanged = {repr(token) for token in have}
    declared = [token for token in _declared(config, older, special, source) if repr(token) not in unchanged]
    known = {token.content for token in [*have, *declared]}
    for token in named:
        if token.content not in known:
            known.add(token.content)
            declared.append(token)
    backend.add_tokens(declared)


def _declared(config: dict, older: Mapping[str, object], special: set[str], source: str) -> list[AddedToken]:
    """`added_tokens_decoder`, or else added_tokens.json, by id."""
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        decoder = {i: {"content": token, "special": token in special} for token, i in older.items()}
    if not isinstance(decoder, dict) or not all(str(key).isdecimal() and len(str(key)) < 10 for key in decoder):
        raise UserError(f"{source}: added_tokens_decoder is {brief(decoder)}; wanted an object of tokens by id.")
    tokens = [_token(decoder[key], "added_tokens_decoder", source) for key in sorted(decoder, key=int)]
    for token in tokens:
        token.special = token.special or token.content in special
    return tokens


def _named(config: dict, source: str) -> Iterator[AddedToken]:
    """The tokens that the config names as special: `bos_token` and the like, those of a family, and lists of them."""
    for key, value in config.items():
        if key in SPECIAL_TOKENS or key.endswith("_token") and isinstance(value, str):
            values = [value]
        elif key in EXTRA:
            values = list(value.values()) if isinstance(value, dict) else value
        else:
            continue
        if not isinstance(values, list | None):
            raise UserError(f"{source}: {key} is {brief(values)}; wanted a list of tokens.")
        for item in values or ():
            if item:
                token = _token(item, key, source)
                token.special = True
                yield token


def _token(value: object, key: str, source: str) -> AddedToken:
    """A token given as a string, or as an object with `content` and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str) or not content:
        raise UserError(f"{source}: {key} is {brief(value)}; wanted a string.")
    special = bool(value.get("special"))
    flags = {"normalized": not special} | {flag: bool(value[flag]) for flag in FLAGS if flag in value}
    return AddedToken(content, special=special, **flags)


def extended(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], overrides: Mapping[int, str], source: str
) -> tokenizers.Tokenizer:
    """A copy with other spellings for some added tokens, by id, and with more tokens, which get the next ids.

    As axolotl's `added_tokens_overrides` and `tokens`. UserError for an id that is not an added token, and for a
    spelling that another token has.
    """
    data = json.loads(backend.to_str())
    by_id = {token["id"]: token for token in data.get("added_tokens") or []}
    vocabulary = data["model"].get("vocab")
    for number, text in overrides.items():
        if number not in by_id:
            raise UserError(
                f"added_tokens_overrides: {number} is not the id of an added token of {source}; only those, such "
                "as the reserved ones, can be spelled in another way"
            )
        if (other := backend.token_to_id(text)) not in (None, number):
            raise UserError(f"added_tokens_overrides: {brief(text)} is token {other} of {source} already")
        old, by_id[number]["content"] = by_id[number]["content"], text
        if isinstance(vocabulary, dict) and vocabulary.get(old) == number:
            vocabulary[text] = vocabulary.pop(old)
        elif isinstance(vocabulary, list) and number < len(vocabulary):
            vocabulary[number][0] = text
        _respell(data.get("post_processor"), old, text)
    with_them = tokenizers.Tokenizer.from_str(json.dumps(data))
    with_them.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return with_them


def _respell(processor: object, old: str, new: str) -> None:
    """Rename a token that a post-processor adds."""
    if not isinstance(processor, dict):
        return
    for part in processor.get("processors") or []:
        _respell(part, old, new)
    for template in (processor.get("single") or []) + (processor.get("pair") or []):
        if isinstance(template, dict) and (template.get("SpecialToken") or {}).get("id") == old:
            template["SpecialToken"]["id"] = new
    named = processor.get("special_tokens")
    if isinstance(named, dict) and old in named:
        named[new] = named.pop(old) | {"id": new, "tokens": [new]}
