"""Dense Granite 4's fused MLP as llama.cpp and mlx-lm have it: gate and up apart, under Llama's names."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lorawgpu.errors import CheckFailed
from lorawgpu.export.effect import WeightChange

FUSED, PARTS = "shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")
FUSED_DOWN, DOWN = "shared_mlp.output_linear", "mlp.down_proj"


def separate(effect: dict[str, WeightChange]) -> dict[str, WeightChange]:
    """The same change by the modules of other runtimes: the parts of a fused matrix share its A and split its B."""
    changes = {}
    for module, change in effect.items():
        if module.endswith(FUSED):
            for part, b in zip(PARTS, np.split(change.b, 2), strict=True):
                changes[module.replace(FUSED, part)] = replace(change, b=b)
        else:
            changes[module.replace(FUSED_DOWN, DOWN)] = change
    return changes


def fuse(changes: dict[str, WeightChange], modules: Iterable[str]) -> dict[str, WeightChange]:
    """The inverse, for the adapted `modules`. Changes of other modules keep their names.

    CheckFailed if the parts of a fused matrix have different A, which no adapter of it has.
    """
    rest, effect = dict(changes), {}
    for module in modules:
        names = [module.replace(FUSED, part) for part in PARTS] if module.endswith(FUSED) else []
        if names and all(name in rest for name in names):
            gate, up = (rest.pop(name) for name in names)
            if not np.array_equal(gate.a, up.a):
                raise CheckFailed(f"read back: gate and up of {module} have different lora_a")
            effect[module] = replace(gate, b=np.vstack([gate.b, up.b]))
        elif (name := module.replace(FUSED_DOWN, DOWN)) in rest:
            effect[module] = rest.pop(name)
    return effect | rest
