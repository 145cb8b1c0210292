"""Embedding lookup: x[t] = weight[ids[t]] * scale. The table is frozen, so there is no backward."""


def embedding_forward(ids, weight, scale=1.0):
    """ids int [M], weight [V, C] -> x [M, C]."""
    return weight[ids] * scale
