"""One op, one file: checks shapes and records dispatches."""
