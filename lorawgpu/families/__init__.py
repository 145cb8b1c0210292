"""Model families as data and small functions: names, config keys and layer specs. No GPU."""
