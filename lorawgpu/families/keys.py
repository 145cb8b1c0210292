"""Strict reading of a `config.json`: every message names the file, the key, what it holds and what was wanted."""

from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

# Upper bounds that no published model comes near; they keep a hostile file from asking for endless work. That of
# head_dim is what the attention kernels can do: ops.attention.MAX_HEAD_DIM (a test holds the two together).
SIZE_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 256,
    "max_position_embeddings": 1 << 30,
}


@dataclass(frozen=True)
class Keys:
    """The settings in `data`, read from the file `source`. Every reader raises UserError for a bad value."""

    data: dict
    source: str

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to the key's limit; a missing or null one is `default`, if there is one."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: {key} is missing; wanted a whole number of at least 1.")
        if type(value) is not int or not 1 <= value <= SIZE_LIMITS[key]:
            limit = SIZE_LIMITS[key]
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted a whole number from 1 to {limit}.")
        return value

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self.data.get(key)
        if value is None:
            raise UserError(f"{self.source}: {key} is missing; wanted a number.")
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted a number above 0.")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted true or false.")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id setting (none, one, or a list) as a tuple."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in values):
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted a token id or a list of them.")
        return tuple(dict.fromkeys(values))

    def head_dim(self) -> int:
        """`head_dim`, else `hidden_size / num_attention_heads`."""
        if "head_dim" in self.data:
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads:
            raise UserError(
                f"{self.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is "
                "missing."
            )
        return hidden // heads

    def activation(self) -> str:
        """`hidden_act` by the name that ops/gate.py has for it."""
        names = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
        value = self.data.get("hidden_act")
        if not isinstance(value, str) or value not in names:
            raise UserError(
                f"{self.source}: hidden_act (act) {brief(value)} is not supported; supported are silu and relu2."
            )
        return names[value]
