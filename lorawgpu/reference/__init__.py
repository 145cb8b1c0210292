"""Every op in NumPy float64. Imported only by tests and `doctor`."""
