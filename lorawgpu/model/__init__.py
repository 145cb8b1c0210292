"""The forward walk."""
