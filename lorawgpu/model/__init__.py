"""The forward pass, for whole sequences and for decoding."""
