"""A token's forward bits depend neither on the capacity nor on its neighbors: whole models."""

import numpy as np
import pytest
from tiny_model import Tiny, random_samples, tiny_config

from lorawgpu.data.batching import flatten

AROUND = {  # lengths before, lengths after, capacity
    "another capacity": ((), (), 128),
    "second of three": ((23,), (31,), 144),
    "after short ones": ((1, 1, 2, 5), (1,), 96),
    "beside a long one": ((117,), (40,), 256),
}


@pytest.mark.parametrize("head_dim, heads", [(10, 3), (64, 3)])
def test_the_logits_of_a_sequence_keep_their_bits(device, kernels, head_dim, heads):
    config = tiny_config(head_dim=head_dim, heads=heads, max_position_embeddings=128)
    engine = Tiny(device, kernels, config).engine(capacity=256, positions=128)
    (sample,) = random_samples((75,), seed=7)

    def logits(before, after, capacity):
        batch = flatten([*random_samples(before), sample, *random_samples(after, seed=1)], capacity)
        return engine.logits(batch, sum(before) + np.arange(len(sample)))

    alone = logits((), (), 80)
    for name, around in AROUND.items():
        assert np.array_equal(logits(*around).view(np.uint32), alone.view(np.uint32)), name
