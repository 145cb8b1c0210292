"""`lorawgpu init`: a starter config for a model and a data file."""
