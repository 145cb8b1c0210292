"""The settings of AdamW and their defaults, which the YAML schema reads. This module imports nothing of ours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of PyTorch's AdamW, and `max_grad_norm`; 0 means no clipping."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
