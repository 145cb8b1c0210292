"""Reading untrusted files, and writing ours atomically."""
