"""Every op in NumPy float64. Read by tests and `doctor` alone."""
