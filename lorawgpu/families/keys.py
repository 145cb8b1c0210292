"""Strict reading of a `config.json`: every message names the file, the key, its value and what was wanted."""

from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.families.modules import MAX_LAYERS
from lorawgpu.files.untrusted import brief

# Upper bounds far above any published model, so that a hostile file cannot demand endless work. The bound on head_dim
# is that of the attention kernels, ops.attention.MAX_HEAD_DIM (a test compares the two).
SIZE_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 512,
    "max_position_embeddings": 1 << 30,
}


# Hugging Face's names of activations, and ours (ops/gate.py).
GATED = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
GELU = {"gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Keys:
    """The settings in `data`, read from the file `source`. Every reader raises UserError for a bad value."""

    data: dict
    source: str

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        """An integer from `at_least` to the key's limit; `default`, if given, when missing or null."""
        value, limit = self.data.get(key), SIZE_LIMITS.get(key, 1 << 22)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: {key} is missing; wanted a whole number of at least {at_least}.")
        if type(value) is not int or not at_least <= value <= limit:
            raise UserError(
                f"{self.source}: {key} is {brief(value)}; wanted a whole number from {at_least} to {limit}."
            )
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

    def optional(self, key: str) -> float | None:
        """A number above 0, or None when missing or null."""
        return None if self.data.get(key) is None else self.number(key)

    def window(self, key: str = "sliding_window") -> int | None:
        """A number of tokens from 1 on, or None when missing or null."""
        value = self.data.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{self.source}: {key} is {brief(value)}; wanted a whole number of at least 1, or null.")
        return value

    def layer_types(self, default: list[str]) -> list[str]:
        """`layer_types`, one of "sliding_attention" and "full_attention" for each layer; `default` if missing."""
        value = self.data.get("layer_types")
        if value is None:
            return default
        known = ("sliding_attention", "full_attention")
        if not isinstance(value, list) or len(value) != len(default) or not all(item in known for item in value):
            raise UserError(
                f"{self.source}: layer_types is {brief(value)}; wanted {len(default)} of {' or '.join(known)}."
            )
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

    def activation(self, key: str = "hidden_act", names: dict[str, str] = GATED) -> str:
        """The activation, under its name in ops/gate.py. names: those that the family has."""
        value = self.data.get(key)
        if not isinstance(value, str) or value not in names:
            *others, last = (name for name in names if name != "swish")
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise UserError(f"{self.source}: {key} (act) {brief(value)} is not supported; wanted {wanted}.")
        return names[value]
