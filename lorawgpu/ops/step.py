"""The `step` buffer: values that change from step to step, in one small uniform (shaders/common/step.wgsl).

lr, inv_targets, m_scale, v_scale    read by the update (ops/adamw.py); written once per step, before the update
key0, key1                           read by dropout; written before each micro-batch
"""

import struct

import numpy as np

from lorawgpu.gpu import Device, Tensor

_LAYOUT = "<4f2I"


def step_buffer(device: Device) -> Tensor:
    """The uniform buffer. Fill it with `device.write(step, pack_step(...))`."""
    return device.uniform(struct.calcsize(_LAYOUT) // 4, "step", "step")


def adam_scales(t: int, beta1: float, beta2: float) -> tuple:
    """(1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)) in float64, because float32 would be off by 1e-4. t counts from 1."""
    return 1.0 / (1.0 - beta1**t), (1.0 - beta2**t) ** -0.5


def pack_step(*, lr=0.0, inv_targets=0.0, m_scale=1.0, v_scale=1.0, key=(0, 0)) -> np.ndarray:
    """The buffer's contents, uint32 [6]. `key` is ops.hash.random_key(seed, step, micro_batch)."""
    return np.frombuffer(struct.pack(_LAYOUT, lr, inv_targets, m_scale, v_scale, *map(int, key)), np.uint32)
