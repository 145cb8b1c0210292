"""Small helpers that have nothing to do with models."""
