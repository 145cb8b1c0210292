"""Reading untrusted files, and writing ours so that nothing is lost."""
