"""`lorawgpu doctor`: checks this machine, and every kernel against its reference."""
