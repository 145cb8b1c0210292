"""`lorawgpu verify`: golden cases from an independent autograd."""
