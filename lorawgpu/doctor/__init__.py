"""`lorawgpu doctor`: this machine, and every kernel against its reference."""
