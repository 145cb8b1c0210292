"""`lorawgpu evaluate`: held-out loss."""
