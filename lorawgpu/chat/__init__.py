"""Chat templates, the sandbox they run in, and which tokens carry the loss."""
