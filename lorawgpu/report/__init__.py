"""`lorawgpu report`: charts and samples of a run on one page."""
