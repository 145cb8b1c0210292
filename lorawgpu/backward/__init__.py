"""The reverse walk: the gradient of every file of `model/`, under the same name."""
