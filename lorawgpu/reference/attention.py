"""Attention of M query rows against a KV cache of S slots: step by step, and from what flash attention saves.

    z[h,t,j]  = scale * q[t,h] . k[j,h/G]                for kv_start[t] <= j <= slot[t], otherwise -inf
                                                         with a window, j > slot[t] - window too
    score     = softcap * tanh(z / softcap)              with a softcap, otherwise z
    attn      = exp(score - lse)                         lse = log(sum_j exp(score))
    out[t,h]  = sum_j attn[h,t,j] v[j,h/G]

    dattn     = dout . v                                 dv[j]  = sum over t and the G heads of attn * dout
    dscore    = attn * (dattn - delta)                   delta  = sum_j attn * dattn = dout . out
    dz        = dscore * (1 - (score/softcap)^2)         dq = scale * dz . k,   dk = scale * dz^T . q, over G heads

q, out [M, NH*HD]; k, v [S, NKV*HD]; scores, attn [NH, M, S]; slot, kv_start int [M]; G = NH / NKV.
M and S are independent: a new query against a longer cache, or a batch of sequences against its own slots.
"""

import numpy as np


def heads(x, n):
    """[M, n*HD] -> [n, M, HD]."""
    return x.reshape(len(x), n, -1).swapaxes(0, 1)


def flat(x):
    """[n, M, HD] -> [M, n*HD]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def shared_heads(x, n_heads, n_kv_heads):
    """k or v [S, NKV*HD] -> [NH, S, HD]: each key/value head repeated for its group of query heads."""
    return heads(x, n_kv_heads).repeat(n_heads // n_kv_heads, axis=0)


def sum_groups(x, n_kv_heads):
    """[NH, S, HD] -> [S, NKV*HD]: the transpose of shared_heads."""
    return flat(x.reshape(n_kv_heads, -1, *x.shape[1:]).sum(1))


def visible(slot, kv_start, slots, window=None):
    """-> bool [M, S]: the cache slots that each query row attends to, at most `window` if given."""
    j, slot = np.arange(slots), np.asarray(slot)[:, None]
    seen = (np.asarray(kv_start)[:, None] <= j) & (j <= slot)
    return seen & (slot < j + window) if window else seen


def attention_scores_forward(q, k, slot, kv_start, n_heads, n_kv_heads, scale, window=None, softcap=None):
    """-> scores [NH, M, S], -inf for slots that a row does not see."""
    z = scale * heads(q, n_heads) @ shared_heads(k, n_heads, n_kv_heads).swapaxes(1, 2)
    score = softcap * np.tanh(z / softcap) if softcap else z
    return np.where(visible(slot, kv_start, len(k), window), score, -np.inf)


def attention_softmax_forward(scores):
    """scores [NH, M, S] -> attn [NH, M, S] (0 for slots that a row does not see), lse [NH, M]."""
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    return np.exp(scores - lse), lse[..., 0]


def attention_apply_forward(attn, v, n_kv_heads):
    """attn [NH, M, S], v [S, NKV*HD] -> out [M, NH*HD]."""
    return flat(attn @ shared_heads(v, len(attn), n_kv_heads))


def attention_apply_backward(dout, attn, v, n_kv_heads):
    """-> dattn [NH, M, S] (also where attn is 0, which the softmax backward drops), dv [S, NKV*HD]."""
    dout = heads(dout, len(attn))
    dattn = dout @ shared_heads(v, len(attn), n_kv_heads).swapaxes(1, 2)
    return dattn, sum_groups(attn.swapaxes(1, 2) @ dout, n_kv_heads)


def attention_softmax_backward(dattn, attn):
    """-> dscores [NH, M, S]."""
    return attn * (dattn - (attn * dattn).sum(-1, keepdims=True))


def attention_scores_backward(dscores, q, k, n_heads, n_kv_heads, scale, softcap=None):
    """dscores [NH, M, S], 0 for slots that a row does not see -> dq [M, NH*HD], dk [S, NKV*HD]."""
    q, k = heads(q, n_heads), shared_heads(k, n_heads, n_kv_heads)
    if softcap:
        dscores = dscores * (1.0 - np.tanh(scale * q @ k.swapaxes(1, 2) / softcap) ** 2)
    return flat(scale * dscores @ k), sum_groups(scale * dscores.swapaxes(1, 2) @ q, n_kv_heads)


def attention_forward(q, k, v, slot, kv_start, n_heads, n_kv_heads, scale, window=None, softcap=None):
    """-> out [M, NH*HD], lse [NH, M], which is what flash attention saves."""
    attn, lse = attention_softmax_forward(
        attention_scores_forward(q, k, slot, kv_start, n_heads, n_kv_heads, scale, window, softcap)
    )
    return attention_apply_forward(attn, v, n_kv_heads), lse


def attention_delta(dout, out, n_heads):
    """-> delta [NH, M] = dout . out per head."""
    return heads(dout * out, n_heads).sum(-1)


def attention_backward(dout, q, k, v, out, lse, slot, kv_start, n_heads, n_kv_heads, scale, window=None, softcap=None):
    """The same gradient, computed only from q, k, v, out and lse -> dq [M, NH*HD], dk, dv [S, NKV*HD]."""
    scores = attention_scores_forward(q, k, slot, kv_start, n_heads, n_kv_heads, scale, window, softcap)
    attn = np.exp(scores - lse[..., None])
    dattn, dv = attention_apply_backward(dout, attn, v, n_kv_heads)
    dscores = attn * (dattn - attention_delta(dout, out, n_heads)[..., None])
    return *attention_scores_backward(dscores, q, k, n_heads, n_kv_heads, scale, softcap), dv
