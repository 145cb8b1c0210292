"""LoRA adapters: the PEFT config, the directory, and where each tensor lies on the GPU."""
