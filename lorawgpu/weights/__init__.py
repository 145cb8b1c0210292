"""Base models: checkpoints on disk, and their weights on the GPU."""
