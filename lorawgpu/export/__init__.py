"""`lorawgpu export`: adapters and merged models for other runtimes."""
