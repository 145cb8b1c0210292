"""The Python API: `lorawgpu.load` and what a loaded model can be asked."""
