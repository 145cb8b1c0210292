"""The whole model in float64, forward and backward, over flat tokens.

    n  = attn_in(x)                                          h = mlp_in(x1)
    q,k,v = Q(n), K(n), V(n); rope([q](q)), rope([k](k))     g, u = GATE(h), UP(h)
    a  = attention(q, k, v)                                  m = act(g) * u
    x1 = x + [attn_out](O([attn_sub](a)))                    x2 = x1 + [mlp_out](DOWN([mlp_sub](m)))
    logits = rmsnorm(x_last, norm) @ head^T

Norms are named by role (families.spec.Norms); those in brackets are optional.

Each backward mirrors its forward from the last line to the first, reads what the forward put into `saved` (by weight
name, or by the name in the equations), and adds adapter gradients to `grads` by PEFT name.
A batch is a training micro-batch: `ids`, `position`, `slot` (= row), `kv_start`, `target_rows`, `target_ids`.
"""

from dataclasses import dataclass, replace

import numpy as np

from lorawgpu.reference.adamw import adamw_update, clip_scale, grad_norm
from lorawgpu.reference.attention import attention_backward, attention_forward
from lorawgpu.reference.cross_entropy import cross_entropy_backward, cross_entropy_forward
from lorawgpu.reference.dense import dense_backward, dense_forward
from lorawgpu.reference.dropout import MODULES, dropout_mask, dropout_step_key
from lorawgpu.reference.embedding import embedding_forward
from lorawgpu.reference.gate import gate_backward, gate_forward
from lorawgpu.reference.gather import gather_backward, gather_forward
from lorawgpu.reference.lora import lora_backward, lora_forward
from lorawgpu.reference.qk_norm import qk_norm_backward, qk_norm_forward
from lorawgpu.reference.quantize import quantize_backward, quantize_forward, quantize_residual
from lorawgpu.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lorawgpu.reference.rope import rope_backward, rope_forward, rope_tables
from lorawgpu.reference.ternary import bitlinear_backward, bitlinear_forward


@dataclass(frozen=True)
class ReferenceModel:
    """Everything that a forward reads. Arrays are float64.

    config: a ModelConfig. weights: HF name -> array [out, in] or [C], or a pair (T, w) for a ternary matrix.
    adapter: PEFT name -> array. scale: alpha/r by linear layer, such as "model.layers.0.self_attn.q_proj".
    dropout: p, with step_key = dropout_step_key(...); 0 outside training.
    residuals: None, or the quantizers' residuals for one micro-batch, by linear layer. A layer missing from it records
    its residual there; any other uses the recorded one. With residuals held, BitNet is smooth, so it can be compared
    with central differences, or with a computation in a different order.
    """

    config: object
    weights: dict
    adapter: dict
    scale: dict
    dropout: float = 0.0
    step_key: np.ndarray | None = None
    residuals: dict | None = None


def adapter_names(linear):
    """`model.layers.0.self_attn.q_proj` -> the PEFT names of its A and B."""
    return tuple(f"base_model.model.{linear}.lora_{x}.weight" for x in "AB")


def mask_of(model, linear, shape):
    """The keep mask of one adapter path, or None without dropout."""
    if not model.dropout:
        return None
    path = linear.split(".")
    return dropout_mask(model.step_key, int(path[2]), MODULES.index(path[-1]), *shape, model.dropout)


def base_forward(model, linear, x):
    weight = model.weights[f"{linear}.weight"]
    if not isinstance(weight, tuple):
        return dense_forward(x, weight)
    if model.residuals is None:
        return bitlinear_forward(*quantize_forward(x), *weight)
    if linear not in model.residuals:
        model.residuals[linear] = quantize_residual(x)
    T, w = weight
    return dense_forward(x + model.residuals[linear], T) * w


def base_backward(model, linear, dy):
    weight = model.weights[f"{linear}.weight"]
    if not isinstance(weight, tuple):
        return dense_backward(dy, weight)
    return quantize_backward(bitlinear_backward(dy, *weight))


def linear_forward(model, linear, x, saved):
    """x [M, in] -> y [M, out] of base and adapter."""
    y = base_forward(model, linear, x)
    A, B = (model.adapter.get(name) for name in adapter_names(linear))
    if A is None:
        return y
    path, u = lora_forward(x, A, B, model.scale[linear], mask_of(model, linear, x.shape), model.dropout)
    saved[linear] = x, u
    return y + path


def linear_backward(model, linear, dy, saved, grads):
    dx = base_backward(model, linear, dy)
    if linear not in saved:
        return dx
    (a, b), (x, u) = adapter_names(linear), saved[linear]
    path, dA, dB = lora_backward(
        dy,
        x,
        u,
        model.adapter[a],
        model.adapter[b],
        model.scale[linear],
        mask_of(model, linear, x.shape),
        model.dropout,
    )
    grads[a] += dA
    grads[b] += dB
    return dx + path


def norm_forward(model, norm, x, saved):
    y, rstd = rmsnorm_forward(x, model.weights[f"{norm}.weight"], model.config.rms_norm_eps)
    saved[norm] = x, rstd
    return y


def norm_backward(model, norm, dy, saved):
    x, rstd = saved[norm]
    return rmsnorm_backward(dy, x, model.weights[f"{norm}.weight"], rstd)


def role_forward(model, layer, role, x, saved):
    """Apply the layer's norm of a role; return x itself if it has none."""
    path = model.config.layers[layer].norms.paths().get(role)
    return norm_forward(model, f"model.layers.{layer}.{path}", x, saved) if path else x


def role_backward(model, layer, role, dy, saved):
    path = model.config.layers[layer].norms.paths().get(role)
    return norm_backward(model, f"model.layers.{layer}.{path}", dy, saved) if path else dy


def head_norm_forward(model, layer, role, x, saved):
    """Normalize every head of q or k; return x itself if the layer has no such norm."""
    if not (path := model.config.layers[layer].norms.paths().get(role)):
        return x
    weight = model.weights[f"model.layers.{layer}.{path}.weight"]
    y, rstd = qk_norm_forward(x, weight, model.config.rms_norm_eps)
    saved[layer, role] = x, weight, rstd
    return y


def head_norm_backward(layer, role, dy, saved):
    return qk_norm_backward(dy, *saved[layer, role]) if (layer, role) in saved else dy


def attention_options(model, layer, batch):
    spec = model.config.layers[layer].attention
    return dict(
        slot=batch.slot, kv_start=batch.kv_start, n_heads=spec.heads, n_kv_heads=spec.kv_heads, scale=spec.scale
    )


def self_attention_forward(model, layer, n, batch, saved):
    """n [M, C] -> O([attn_sub](attention)) [M, C]."""
    at, spec = f"model.layers.{layer}.self_attn", model.config.layers[layer].attention
    q, k, v = (linear_forward(model, f"{at}.{x}_proj", n, saved) for x in "qkv")
    q, k = head_norm_forward(model, layer, "q", q, saved), head_norm_forward(model, layer, "k", k, saved)
    tables = rope_tables(batch.position, spec.rope.inv_freq(spec.head_dim))
    q, k = rope_forward(q, *tables), rope_forward(k, *tables)
    a, lse = attention_forward(q, k, v, **attention_options(model, layer, batch))
    saved[at] = tables, (q, k, v, a, lse)
    return linear_forward(model, f"{at}.o_proj", role_forward(model, layer, "attn_sub", a, saved), saved)


def self_attention_backward(model, layer, dy, batch, saved, grads):
    """dy [M, C] -> dn [M, C]."""
    at = f"model.layers.{layer}.self_attn"
    da = role_backward(model, layer, "attn_sub", linear_backward(model, f"{at}.o_proj", dy, saved, grads), saved)
    tables, tensors = saved[at]
    dq, dk, dv = attention_backward(da, *tensors, **attention_options(model, layer, batch))
    dq, dk = rope_backward(dq, *tables), rope_backward(dk, *tables)
    dq, dk = head_norm_backward(layer, "q", dq, saved), head_norm_backward(layer, "k", dk, saved)
    return (
        linear_backward(model, f"{at}.q_proj", dq, saved, grads)
        + linear_backward(model, f"{at}.k_proj", dk, saved, grads)
        + linear_backward(model, f"{at}.v_proj", dv, saved, grads)
    )


def mlp_forward(model, layer, h, saved):
    """h [M, C] -> DOWN([mlp_sub](act(g) * u)) [M, C]."""
    at = f"model.layers.{layer}.mlp"
    g, u = (linear_forward(model, f"{at}.{x}_proj", h, saved) for x in ("gate", "up"))
    m = gate_forward(g, u, model.config.layers[layer].mlp.act)
    saved[at] = g, u
    return linear_forward(model, f"{at}.down_proj", role_forward(model, layer, "mlp_sub", m, saved), saved)


def mlp_backward(model, layer, dy, saved, grads):
    """dy [M, C] -> dh [M, C]."""
    at = f"model.layers.{layer}.mlp"
    dm = role_backward(model, layer, "mlp_sub", linear_backward(model, f"{at}.down_proj", dy, saved, grads), saved)
    dg, du = gate_backward(dm, *saved[at], model.config.layers[layer].mlp.act)
    return linear_backward(model, f"{at}.gate_proj", dg, saved, grads) + linear_backward(
        model, f"{at}.up_proj", du, saved, grads
    )


def block_forward(model, layer, x, batch, saved):
    """x [M, C] -> x2 [M, C]."""
    n = role_forward(model, layer, "attn_in", x, saved)
    y = self_attention_forward(model, layer, n, batch, saved)
    x = x + role_forward(model, layer, "attn_out", y, saved)
    y = mlp_forward(model, layer, role_forward(model, layer, "mlp_in", x, saved), saved)
    return x + role_forward(model, layer, "mlp_out", y, saved)


def block_backward(model, layer, dx, batch, saved, grads):
    """d x2 [M, C] -> dx [M, C]."""
    dh = mlp_backward(model, layer, role_backward(model, layer, "mlp_out", dx, saved), saved, grads)
    dx = dx + role_backward(model, layer, "mlp_in", dh, saved)
    dy = role_backward(model, layer, "attn_out", dx, saved)
    dn = self_attention_backward(model, layer, dy, batch, saved, grads)
    return dx + role_backward(model, layer, "attn_in", dn, saved)


def head_weight(model):
    return model.weights["model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"]


def model_forward(model, batch):
    """-> logits [M, V] of all rows, saved."""
    saved = {}
    x = embedding_forward(batch.ids, model.weights["model.embed_tokens.weight"], model.config.embed_scale)
    for layer in range(model.config.num_hidden_layers):
        x = block_forward(model, layer, x, batch, saved)
    return dense_forward(norm_forward(model, "model.norm", x, saved), head_weight(model)), saved


def model_backward(model, batch, logits, saved, grads, weights=1.0):
    """Add the adapter gradients of the loss SUM over the batch's targets, weighted by row, into grads."""
    logits = gather_forward(logits, batch.target_rows)
    lse = cross_entropy_forward(logits, batch.target_ids)[1]
    dlogits = cross_entropy_backward(logits, batch.target_ids, lse, weights)
    dx = gather_backward(dense_backward(dlogits, head_weight(model)), batch.target_rows, len(batch.ids))
    dx = norm_backward(model, "model.norm", dx, saved)
    for layer in reversed(range(model.config.num_hidden_layers)):
        dx = block_backward(model, layer, dx, batch, saved, grads)


def loss_sum(logits, batch, weights=1.0):
    """-> the loss summed over the batch's targets, weighted by row."""
    return cross_entropy_forward(gather_forward(logits, batch.target_rows), batch.target_ids, weights)[0].sum()


def step_gradients(model, batches, seed=0, step=1):
    """Loss and gradients of one optimizer step: sums, weighted by row_weights, divided by the number of targets.

    seed and step (from 1) key the dropout. -> loss, {PEFT name: gradient}.
    """
    grads = {name: np.zeros(p.shape) for name, p in model.adapter.items()}
    loss, targets = 0.0, sum(len(batch.target_ids) for batch in batches)
    for i, batch in enumerate(batches):
        model = replace(model, step_key=dropout_step_key(seed, step, i))
        logits, saved = model_forward(model, batch)
        weights = 1.0 if batch.row_weights is None else batch.row_weights
        model_backward(model, batch, logits, saved, grads, weights)
        loss += loss_sum(logits, batch, weights)
    return loss / targets, {name: g / targets for name, g in grads.items()}


def train(model, batches, steps, *, lr, betas, eps, weight_decay, max_grad_norm, seed=0):
    """Take `steps` AdamW steps, each over the same micro-batches.

    -> losses, gradient norms before clipping, the trained adapter.
    """
    losses, norms = [], []
    moments = {name: (np.zeros(p.shape), np.zeros(p.shape)) for name, p in model.adapter.items()}
    for t in range(1, steps + 1):
        loss, grads = step_gradients(model, batches, seed, t)
        norm = grad_norm(grads.values())
        clip, adapter = clip_scale(norm, max_grad_norm), {}
        for name, p in model.adapter.items():
            adapter[name], *moments[name] = adamw_update(
                p, clip * grads[name], *moments[name], t, lr, *betas, eps, weight_decay
            )
        model = replace(model, adapter=adapter)
        losses.append(loss)
        norms.append(norm)
    return losses, norms, model.adapter
