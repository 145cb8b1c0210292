"""Dropout's keep mask: a counter-based hash, so that the backward recomputes the forward's mask instead of storing it.

All arithmetic is on u32 and wraps, as in WGSL.

    mix(h):      h ^= h >> 16;  h *= 0x85ebca6b;  h ^= h >> 13;  h *= 0xc2b2ae35;  h ^= h >> 16
    fold(k, w):  mix(k ^ w) + 0x9e3779b9
    step key:    k_i = fold(fold(fold(fold(START_i, seed low), seed high), step), micro_batch)      i = 0, 1
    stream key:  k_i = fold(k_i, layer * 7 + module)      module: 0..6 of q, k, v, o, gate, up, down
    element:     h = mix(mix((token * in + column) ^ k_0) + k_1);    kept iff h >= floor(p * 2^32)

The host computes the step key (it goes into the step buffer), the kernel the rest. There are two key words, because
with one, the masks of two streams would be permutations of each other. `mix` is MurmurHash3's 32-bit finalizer.
"""

import numpy as np

# The linear layers of a block. Changing their order would change masks.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
START = (0x243F6A88, 0x85A308D3)  # the first digits of pi; any two different words would do


def mix(h):
    """uint32 array -> uint32 array: a bijection in which every input bit affects every output bit."""
    h = h ^ h >> np.uint32(16)
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ h >> np.uint32(13)
    h = h * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def fold(key, word):
    """Absorb `word` (an int, taken mod 2^32) into a uint32 array of keys."""
    return mix(key ^ np.uint32(word & 0xFFFFFFFF)) + np.uint32(0x9E3779B9)


def dropout_step_key(seed, step, micro_batch):
    """-> uint32 [2], which the host writes into the step buffer for one micro-batch. seed may have 64 bits."""
    key = np.array(START, np.uint32)
    for word in (seed, seed >> 32, step, micro_batch):
        key = fold(key, word)
    return key


def dropout_mask(step_key, layer, module, tokens, in_features, p):
    """Keep mask of one adapter path, bool [tokens, in_features]. module: an index into MODULES; 0 <= p < 1."""
    k0, k1 = fold(step_key, layer * len(MODULES) + module)
    index = np.arange(tokens * in_features, dtype=np.uint64).astype(np.uint32)
    kept = mix(mix(index ^ k0) + k1) >= np.uint32(int(p * 2**32))
    return kept.reshape(tokens, in_features)
