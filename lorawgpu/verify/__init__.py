"""`lorawgpu verify`: golden cases of an outside autograd."""
