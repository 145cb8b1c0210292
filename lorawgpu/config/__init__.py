"""The YAML schema of a training run: typed, strict, every default in one place."""
