"""What a model family is: its names, keys and layer options. Data and small functions, no GPU."""
