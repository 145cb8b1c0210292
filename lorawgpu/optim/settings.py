"""The settings of AdamW and their defaults, which the config's schema reads: this module imports nothing of ours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamWSettings:
    """PyTorch's; `max_grad_norm` 0 does not clip."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
