"""Typed access to the metadata of a GGUF model."""

import math
from dataclasses import dataclass

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.gguf import GgufFile
from lorawgpu.files.untrusted import brief


@dataclass(frozen=True)
class GgufKeys:
    """The metadata of `file`. Keys are given below the architecture's name. Every reader raises UserError."""

    file: GgufFile

    @property
    def arch(self) -> str:
        return self.file.metadata["general.architecture"]

    def full(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def get(self, key: str):
        """The value as Python objects, or None."""
        value = self.file.metadata.get(self.full(key))
        return value.tolist() if hasattr(value, "tolist") else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file.path}: metadata key {self.full(key)} is missing.")
        if type(value) is not int or value < 1:
            raise UserError(
                f"{self.file.path}: {self.full(key)} is {brief(value)}; wanted one whole number, at least 1, for all "
                "layers."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file.path}: metadata key {self.full(key)} is missing.")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{self.file.path}: {self.full(key)} is {brief(value)}; wanted a finite number.")
        return float(value)

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """A whole number for each layer; the file may store one for all."""
        count, value = self.integer("block_count"), self.get(key)
        if not isinstance(value, list):
            return [self.integer(key, default)] * count
        if len(value) != count or not all(type(item) is int and item >= 1 for item in value):
            raise UserError(f"{self.file.path}: {self.full(key)} is {brief(value)}; wanted {count} whole numbers.")
        return value

    def flags(self, key: str) -> list[bool] | None:
        """A list of booleans, one for each layer, or None if the key is missing."""
        count, value = self.integer("block_count"), self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise UserError(f"{self.file.path}: {self.full(key)} is {brief(value)}; wanted {count} booleans.")
        return [bool(item) for item in value]

    def token(self, key: str) -> int | None:
        """A token id of the tokenizer, or None."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and type(value) is not int:
            raise UserError(f"{self.file.path}: tokenizer.ggml.{key} is {brief(value)}; wanted a token id.")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def vector(self, tensor: str) -> list[float]:
        """A float32 vector of positive numbers, such as RoPE's factors."""
        values, kind = self.file.read(tensor)
        if kind != "F32" or values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
            raise UserError(f"{self.file.path}: {tensor} is not a vector of positive numbers.")
        return values.astype(float).tolist()
