"""Strict reading of a `config.json`: every message names the file, the key, its value and what was wanted."""

from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

# Upper bounds far above any published model, so that a hostile file cannot demand endless work. The bound on head_dim
# is that of the attention kernels, ops.attention.MAX_HEAD_DIM (a test compares the two).
SIZE_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 512,
    "max_position_embeddings": 1 << 30,
}


@dataclass(frozen=True)
class Keys:
    """The settings in `data`, read from the file `source`. Every reader raises UserError for a bad value."""

    data: dict
    source: str

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to the key's limit; `default`, if given, when missing or null."""
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
        """Token ids (none, one, or a list) as a tuple without duplicates."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in values):
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted a token id or a list of them.")
        return tuple(dict.fromkeys(values))

    def head_dim(self) -> int:
        """`head_dim`, or `hidden_size / num_attention_heads` if missing."""
        if "head_dim" in self.data:
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads:
            raise UserError(
                f"{self.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim "
                "is missing."
            )
        return hidden // heads

    def activation(self) -> str:
        """`hidden_act`, under its name in ops/gate.py."""
        names = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
        value = self.data.get("hidden_act")
        if not isinstance(value, str) or value not in names:
            raise UserError(f"{self.source}: hidden_act (act) {brief(value)} is not supported; wanted silu or relu2.")
        return names[value]
