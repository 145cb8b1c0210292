"""The Python API: `lorawgpu.load` and the methods of a loaded model."""
