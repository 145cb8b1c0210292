"""Keys for counter-based random numbers, computed on the host; kernels continue with shaders/common/hash.wgsl."""

_START = (0x243F6A88, 0x85A308D3)  # the first digits of pi
_WORD = 0xFFFFFFFF


def _mix(h: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & _WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _WORD
    return h ^ h >> 16


def random_key(seed: int, *words: int) -> tuple[int, int]:
    """Two 32-bit key words from a seed of up to 64 bits and further words, each taken modulo 2^32."""
    seed, keys = int(seed), _START  # NumPy integers would overflow
    for word in (seed, seed >> 32, *words):
        keys = tuple(_mix(key ^ word & _WORD) + 0x9E3779B9 & _WORD for key in keys)
    return keys
