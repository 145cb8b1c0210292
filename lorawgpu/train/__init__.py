"""`lorawgpu train`: a run from its config to its adapter."""
