"""The backward pass: each file here is the gradient of the file with the same name in `model/`."""
