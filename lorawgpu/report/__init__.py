"""`lorawgpu report`: one page of charts and samples of a run."""
