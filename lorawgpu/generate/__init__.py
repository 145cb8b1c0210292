"""`lorawgpu generate`: decoding with a KV cache, sampling on the GPU."""
