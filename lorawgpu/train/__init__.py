"""`lorawgpu train`: from a config to an adapter."""
