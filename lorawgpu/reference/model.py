"""The whole model in float64, forward and backward, over flat tokens.

    n  = [attn_in](x)                                        h = [mlp_in](x1)
    q,k,v = Q(n), K(n), V(n); rope([q](q)), rope([k](k))     g, u = GATE(h), UP(h)
    a  = attention(q, k, v)                                  m = act(g) * u
    x1 = x + [attn_out](O([attn_sub](a)))                    x2 = x1 + [mlp_out](DOWN([mlp_sub](m)))
    x3 = [scalar] (x2 + ple_out(PROJ(act(GATE(x2)) * ple)))  with a per-layer input
    logits = [cap](rmsnorm(x_last, norm) @ head^T)

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
from lorawgpu.reference.per_layer import per_layer_forward
from lorawgpu.reference.quantize import quantize_backward, quantize_forward, quantize_residual
from lorawgpu.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lorawgpu.reference.rope import heads_backward, heads_forward, rope_tables
from lorawgpu.reference.softcap import softcap_forward
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
    *_, layer, _, module = linear.split(".")
    return dropout_mask(model.step_key, int(layer), MODULES.index(module), *shape, model.dropout)


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
    return norm_forward(model, f"{model.config.layer_path(layer)}.{path}", x, saved) if path else x


def role_backward(model, layer, role, dy, saved):
    path = model.config.layers[layer].norms.paths().get(role)
    return norm_backward(model, f"{model.config.layer_path(layer)}.{path}", dy, saved) if path else dy


def attention_parts(model, layer):
    """The parts of the fused projection and what happens to each: [(name, options of heads_forward)]."""
    spec = model.config.layers[layer]
    attention, eps, at = spec.attention, model.config.rms_norm_eps, model.config.layer_path(layer)

    def weight(role):
        path = spec.norms.paths().get(role)
        return {} if path is None else {"weight": model.weights[f"{at}.{path}.weight"], "eps": eps}

    value = {"scale": spec.residual_scale}  # a factor of v is one of the attention's output
    if attention.v_norm:
        value |= {"weight": np.ones(attention.head_dim), "eps": eps}
    return [("q", weight("q")), ("k", weight("k")), ("v", value)]


def projections_forward(model, layer, n, saved):
    """n [M, C] -> the raw q, k and v, with their biases; k and v are None if the layer has none of its own."""
    config, spec = model.config, model.config.layers[layer].attention
    modules = config.group_modules(layer, "qkv")
    y = np.concatenate([biased_forward(model, module, n, saved) for module in modules], axis=1)
    parts = np.split(y, np.cumsum(spec.part_widths)[:-1], axis=1)
    if spec.shares is not None:
        return parts[0], None, None
    return (*parts, parts[1]) if spec.v_from_k else tuple(parts)


def biased_forward(model, linear, x, saved):
    return linear_forward(model, linear, x, saved) + model.weights.get(f"{linear}.bias", 0.0)


def projections_backward(model, layer, dq, dk, dv, saved, grads):
    """The gradients of the raw q, k and v -> dn [M, C]."""
    spec, modules = model.config.layers[layer].attention, model.config.group_modules(layer, "qkv")
    parts = [dq] if spec.shares is not None else [dq, dk + dv] if spec.v_from_k else [dq, dk, dv]
    if len(modules) < len(parts):
        parts = [np.concatenate(parts, axis=1)]
    return sum(linear_backward(model, m, d, saved, grads) for m, d in zip(modules, parts, strict=True))


def attention_options(model, layer, batch):
    spec = model.config.layers[layer].attention
    return dict(
        slot=batch.slot,
        kv_start=batch.kv_start,
        n_heads=spec.heads,
        n_kv_heads=spec.kv_heads,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
    )


def tables_of(spec, batch):
    """Tables of q and k: cos and sin [M, rotary/2] of the batch's rows, for q times `Rope.query_scale`.

    longrope chooses by the length of each row's sequence.
    """
    rope, inv = spec.rope, [spec.rope.inv_freq(spec.head_dim, long) for long in (False, True)]
    long = (batch.segment_end - batch.kv_start > rope.original_max_position_embeddings) & rope.switches
    tables = [rope_tables(batch.position, frequencies) for frequencies in inv]
    k = [rope.attention_factor * np.where(long[:, None], b, a) for a, b in zip(*tables, strict=True)]
    return {"q": [rope.query_scale(batch.position)[:, None] * table for table in k], "k": k}


def self_attention_forward(model, layer, n, batch, saved):
    """n [M, C] -> O([attn_sub](attention)) [M, C]."""
    at, spec = f"{model.config.layer_path(layer)}.self_attn", model.config.layers[layer].attention
    raw, tables = projections_forward(model, layer, n, saved), tables_of(spec, batch)
    finished = []
    for (name, options), x in zip(attention_parts(model, layer), raw, strict=True):
        turn = {"tables": tables.get(name)}
        finished.append(None if x is None else heads_forward(x, spec.head_dim, **options, **turn))
    q, k, v = finished
    if spec.shares is not None:
        k, v = saved["kv", spec.shares]
    saved["kv", layer] = k, v
    a, lse = attention_forward(q, k, v, **attention_options(model, layer, batch))
    saved[at] = raw, tables, (q, k, v, a, lse)
    (o,) = model.config.group_modules(layer, "o")
    return linear_forward(model, o, role_forward(model, layer, "attn_sub", a, saved), saved)


def self_attention_backward(model, layer, dy, batch, saved, grads):
    """dy [M, C] -> dn [M, C]. The gradients of shared keys and values are summed in saved["dkv", layer]."""
    at, spec = f"{model.config.layer_path(layer)}.self_attn", model.config.layers[layer].attention
    (o,) = model.config.group_modules(layer, "o")
    da = role_backward(model, layer, "attn_sub", linear_backward(model, o, dy, saved, grads), saved)
    raw, tables, tensors = saved[at]
    dq, *dkv = attention_backward(da, *tensors, **attention_options(model, layer, batch))
    producer = layer if spec.shares is None else spec.shares
    dkv = [d + more for d, more in zip(dkv, saved.pop(("dkv", producer), (0.0, 0.0)), strict=True)]
    if spec.shares is not None:
        saved["dkv", producer], dkv = dkv, [None, None]
    d_raw = []
    for (name, options), d, x in zip(attention_parts(model, layer), (dq, *dkv), raw, strict=True):
        turn = {"tables": tables.get(name)}
        d_raw.append(None if d is None else heads_backward(d, x, spec.head_dim, **options, **turn))
    return projections_backward(model, layer, *d_raw, saved, grads)


def mlp_forward(model, layer, h, saved):
    """h [M, C] -> DOWN([mlp_sub](act(g) * u)) [M, C]."""
    spec, at = model.config.layers[layer], f"{model.config.layer_path(layer)}.mlp"
    modules, (down,) = (model.config.group_modules(layer, group) for group in ("gate_up", "down"))
    g, u = np.split(np.concatenate([linear_forward(model, m, h, saved) for m in modules], axis=1), 2, axis=1)
    m = gate_forward(g, u, spec.mlp.act, spec.residual_scale)
    saved[at] = g, u
    return linear_forward(model, down, role_forward(model, layer, "mlp_sub", m, saved), saved)


def mlp_backward(model, layer, dy, saved, grads):
    """dy [M, C] -> dh [M, C]."""
    spec, at = model.config.layers[layer], f"{model.config.layer_path(layer)}.mlp"
    modules, (down,) = (model.config.group_modules(layer, group) for group in ("gate_up", "down"))
    dm = role_backward(model, layer, "mlp_sub", linear_backward(model, down, dy, saved, grads), saved)
    parts = gate_backward(dm, *saved[at], spec.mlp.act, spec.residual_scale)
    parts = [np.concatenate(parts, axis=1)] if len(modules) == 1 else parts
    return sum(linear_backward(model, m, d, saved, grads) for m, d in zip(modules, parts, strict=True))


def per_layer_input(model, layer, e, batch):
    """e [M, C], the scaled embedding -> the layer's own input [M, P]."""
    config, width = model.config, model.config.per_layer_input
    columns = slice(layer * width, (layer + 1) * width)
    projected = e @ model.weights[f"{config.prefix}per_layer_model_projection.weight"][columns].T
    weight = model.weights[f"{config.prefix}per_layer_projection_norm.weight"]
    table = model.weights[f"{config.prefix}embed_tokens_per_layer.weight"]
    return per_layer_forward(
        projected, table[batch.ids, columns], weight, scale=config.hidden_size**-0.5, eps=config.rms_norm_eps
    )


def per_layer_half_forward(model, layer, x, batch, saved):
    """x [M, C] -> PROJ(act(GATE(x)) * ple) [M, C]."""
    (gate,), (project,) = (model.config.group_modules(layer, group) for group in ("ple_gate", "ple_proj"))
    g, ple = linear_forward(model, gate, x, saved), per_layer_input(model, layer, saved["embedded"], batch)
    saved["per layer", layer] = g, ple
    return linear_forward(model, project, gate_forward(g, ple, model.config.layers[layer].mlp.act), saved)


def per_layer_half_backward(model, layer, dy, saved, grads):
    """dy [M, C] -> dx [M, C]."""
    (gate,), (project,) = (model.config.group_modules(layer, group) for group in ("ple_gate", "ple_proj"))
    dm = linear_backward(model, project, dy, saved, grads)
    dg, _ = gate_backward(dm, *saved["per layer", layer], model.config.layers[layer].mlp.act)
    return linear_backward(model, gate, dg, saved, grads)


def scalar_of(model, layer):
    return model.weights.get(f"{model.config.layer_path(layer)}.layer_scalar", np.ones(1))[0]


def block_forward(model, layer, x, batch, saved):
    """x [M, C] -> x2 [M, C]."""
    n = role_forward(model, layer, "attn_in", x, saved)
    y = self_attention_forward(model, layer, n, batch, saved)
    x = x + role_forward(model, layer, "attn_out", y, saved)
    y = mlp_forward(model, layer, role_forward(model, layer, "mlp_in", x, saved), saved)
    x = x + role_forward(model, layer, "mlp_out", y, saved)
    if model.config.per_layer_input:
        y = per_layer_half_forward(model, layer, x, batch, saved)
        x = x + role_forward(model, layer, "ple_out", y, saved)
    return x * scalar_of(model, layer)


def block_backward(model, layer, dx, batch, saved, grads):
    """d x2 [M, C] -> dx [M, C]."""
    dx = dx * scalar_of(model, layer)
    if model.config.per_layer_input:
        dx = dx + per_layer_half_backward(model, layer, role_backward(model, layer, "ple_out", dx, saved), saved, grads)
    dh = mlp_backward(model, layer, role_backward(model, layer, "mlp_out", dx, saved), saved, grads)
    dx = dx + role_backward(model, layer, "mlp_in", dh, saved)
    dy = role_backward(model, layer, "attn_out", dx, saved)
    dn = self_attention_backward(model, layer, dy, batch, saved, grads)
    return dx + role_backward(model, layer, "attn_in", dn, saved)


def head_weight(model):
    tied = f"{model.config.prefix}embed_tokens.weight"
    return model.weights[tied if model.config.tie_word_embeddings else "lm_head.weight"]


def model_forward(model, batch):
    """-> logits [M, V] of all rows, saved."""
    config, saved = model.config, {}
    x = embedding_forward(batch.ids, model.weights[f"{config.prefix}embed_tokens.weight"], config.embed_scale)
    saved["embedded"] = x
    for layer in range(config.num_hidden_layers):
        x = block_forward(model, layer, x, batch, saved)
    raw = dense_forward(norm_forward(model, f"{config.prefix}norm", x, saved), head_weight(model)) * config.logits_scale
    return softcap_forward(raw, config.final_softcap) if config.final_softcap else raw, saved


def model_backward(model, batch, logits, saved, grads, weights=1.0):
    """Add the adapter gradients of the loss SUM over the batch's targets, weighted by row, into grads."""
    config, logits = model.config, gather_forward(logits, batch.target_rows)
    lse = cross_entropy_forward(logits, batch.target_ids)[1]
    dlogits = cross_entropy_backward(logits, batch.target_ids, lse, weights)
    if config.final_softcap:
        dlogits = dlogits * (1 - (logits / config.final_softcap) ** 2)
    dlogits = dlogits * config.logits_scale
    dx = gather_backward(dense_backward(dlogits, head_weight(model)), batch.target_rows, len(batch.ids))
    dx = norm_backward(model, f"{config.prefix}norm", dx, saved)
    for layer in reversed(range(config.num_hidden_layers)):
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
