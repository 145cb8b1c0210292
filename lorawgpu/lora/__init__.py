"""LoRA adapters: PEFT's config and directory, and the layout of the tensors on the GPU."""
