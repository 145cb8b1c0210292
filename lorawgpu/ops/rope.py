"""From the fused projection to attention: biases, norms of heads, rotary embedding, and storing k and v in the cache.

Equations and layout: shaders/rope.wgsl.j2 where all of q and k rotates and nothing else is asked for, else
shaders/rope_heads.wgsl.j2. Either reads qkv once.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import Tensor, padded
from lorawgpu.ops.checks import WG, expect, fold

LANES = 128  # threads of a workgroup in rope_heads, and so the most that share a norm's sum


@dataclass(frozen=True)
class Heads:
    """Where the heads of q, k and v are in a fused projection qkv [rows, ld], and what happens to them.

        q = rope(norm(q + bias))    k = rope(norm(k + bias))    v = v_scale * v_norm(v + bias)

    q begins at column 0. Offsets need not be padded: where one is not a multiple of 4, the kernels read single floats.
    """

    heads: int
    kv_heads: int  # 0 if the layer has no keys and values of its own: qkv is q alone
    head_dim: int  # even
    rot: int  # the first `rot` dimensions of a head rotate, in pairs (i, i + rot/2); even; 0 for none
    k_off: int | None = None  # first column of k; None only without keys
    v_off: int | None = None  # first column of v; None if values are made from keys: v = v_scale * v_norm(k + bias)
    norm: str | None = None  # RMS norm of q and k: "head" over each head, "row" over all heads of a token; None: none
    v_norm: bool = False  # RMS norm of each head of v, without weights; not next to norm "row"
    bias: bool = False  # frozen: it has no gradient
    eps: float = 0.0  # of all norms
    v_scale: float = 1.0
    q_table: bool = False  # q has cosines and sines of its own: the table's columns [rot, 2 rot); k has the first rot

    def __post_init__(self):
        if self.head_dim % 2 or self.rot % 2 or not 0 <= self.rot <= self.head_dim:
            raise ValueError(f"heads of {self.head_dim}, of which {self.rot} rotate: wanted even numbers")
        if self.norm not in (None, "head", "row") or (self.norm == "row" and self.v_norm):
            raise ValueError(f"norm {self.norm!r} with v_norm {self.v_norm}: wanted None, 'head', or 'row' without it")
        if (self.k_off is None) != (not self.kv_heads) or (self.v_off is not None and not self.kv_heads):
            raise ValueError(f"{self.kv_heads} key heads, with k from {self.k_off} and v from {self.v_off}")
        if self.q_table and self.rot != self.head_dim:
            raise ValueError(f"a table for q with {self.rot} of {self.head_dim} dimensions rotating: wanted all")

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def plain(self) -> bool:
        """Whether all of q and k rotates and nothing else is asked for."""
        extra = self.norm or self.v_norm or self.bias or self.v_scale != 1 or self.q_table
        return not extra and self.v_off is not None and self.rot == self.head_dim

    @property
    def normed(self) -> bool:
        """Whether the backward reads the forward's qkv."""
        return self.norm is not None or self.v_norm

    @property
    def constant_rows(self) -> int:
        """Rows of the tensor `constants`."""
        return (self.norm is not None) + self.bias

    @property
    def table_width(self) -> int:
        """Columns of the tensor `table`."""
        return self.rot * (1 + self.q_table)


def rope_table(inv_freq: np.ndarray, positions: int, factor: float = 1.0, q_scale=None) -> np.ndarray:
    """cos, then sin, of position * inv_freq, both times `factor`: float32 [positions, rot], computed in float64.

    inv_freq: float64 [rot/2], scaling included (`Rope.inv_freq`). factor: the attention factor of YaRN and LongRoPE.
    q_scale: float64 [positions], the factors of q (`Rope.query_scale`): then [positions, 2 rot], as `Heads.q_table`.
    """
    angle = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(inv_freq, np.float64)
    table = factor * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    if q_scale is not None:
        table = np.concatenate([table, q_scale[:, None] * table], axis=1)
    return table.astype(np.float32)


def head_constants(heads: Heads, ld: int, *, q_norm=None, k_norm=None, bias=None) -> np.ndarray:
    """The tensor `constants` for `heads`: float32 [constant_rows, ld], in qkv's columns.

    Its first row holds the weights of the norms, if there are any; its last one the biases, if there are any.
    q_norm, k_norm: [head_dim], or for norm "row" [heads * head_dim] and [kv_heads * head_dim]. bias: (q, k, v), those
    that qkv holds. ValueError for other shapes.
    """
    parts = [(0, heads.q_width), (heads.k_off, heads.kv_width), (heads.v_off, heads.kv_width)]
    parts = [(first, width) for first, width in parts if first is not None]
    out = np.zeros((heads.constant_rows, ld), np.float32)
    if heads.norm:
        for (first, width), weight in zip(parts, (q_norm, k_norm), strict=False):
            wanted = heads.head_dim if heads.norm == "head" else width
            if np.shape(weight) != (wanted,):
                raise ValueError(f"weights of a {heads.norm} norm: got {np.shape(weight)}, wanted ({wanted},)")
            out[0, first : first + width] = np.tile(weight, width // wanted)
    if heads.bias:
        for (first, width), values in zip(parts, bias, strict=True):
            if np.shape(values) != (width,):
                raise ValueError(f"a bias: got {np.shape(values)}, wanted ({width},)")
            out[-1, first : first + width] = values
    return out


def rope_forward(
    plan, q, kcache, vcache, qkv, position, slot, table, *, rows: int, heads: Heads, constants: Tensor | None = None
):
    """Write q [rows, padded(NH*HD)], and row slot[t] of kcache and vcache [cache_rows, padded(KV*HD)] for token t.

    qkv [rows, ld]; position, slot i32 [rows]; table [positions, heads.table_width] from `rope_table`, longer than any
    position;
    constants [heads.constant_rows, ld] from `head_constants`. A slot outside the cache is not written.
    What `heads` has no use for may be None: constants; kcache, vcache and slot without keys; position and table if
    nothing rotates. ValueError for a tensor of another shape.
    """
    ld = _check(heads, rows, qkv, q, kcache, vcache, position, slot, table)
    tensors = {"qkv": qkv, "q": q, "kcache": kcache, "vcache": vcache}
    if heads.plain:
        _record_plain(plan, "forward", heads, rows, ld, table, **tensors, position=position, slot=slot)
        return
    index = {"position": position, "slot": slot, "table": table}
    _record_heads(plan, "forward", heads, rows, ld, Parts(True, heads.kv_heads > 0), constants, **tensors, **index)


def rope_backward(
    plan,
    dqkv,
    dq,
    dk,
    dv,
    position,
    slot,
    table,
    *,
    rows: int,
    heads: Heads,
    qkv: Tensor | None = None,
    constants: Tensor | None = None,
):
    """dqkv [rows, ld], every column of it: the gradient of the forward's qkv, given dq, and dk, dv by slot.

    dq [rows, padded(NH*HD)]; dk, dv [cache_rows, padded(KV*HD)], of which token t reads row slot[t]; the others as in
    the forward. qkv and constants are read if `heads.normed`: the statistics of the norms are computed again.
    """
    ld = _check(heads, rows, dqkv, dq, dk, dv, position, slot, table)
    tensors = {"dqkv": dqkv, "dq": dq, "dk": dk, "dv": dv}
    if heads.plain:
        _record_plain(plan, "backward", heads, rows, ld, table, **tensors, position=position, slot=slot)
        return
    if heads.normed:
        expect("qkv", qkv, (rows, ld))
    index = {"position": position, "slot": slot, "table": table}
    both = Parts(True, heads.kv_heads > 0)
    split = [Parts(True, False), Parts(False, True)] if heads.normed and both.kv else [both]  # at most 8 buffers
    for parts in split:
        _record_heads(plan, "backward", heads, rows, ld, parts, constants, qkv=qkv, **tensors, **index)


@dataclass(frozen=True)
class Parts:
    """The parts of qkv that one dispatch covers."""

    q: bool
    kv: bool


def _check(heads: Heads, rows, qkv, q, k, v, position, slot, table) -> int:
    """Check shapes; qkv, q, k, v may be their gradients. Returns the row stride of qkv."""
    ld, Q, KV = qkv.shape[1], heads.q_width, heads.kv_width
    expect("qkv", qkv, (rows, ld))
    expect("q", q, (rows, padded(Q)))
    starts = [Q]
    if heads.kv_heads:
        expect("k", k, (0, padded(KV)))
        expect("v", v, (k.shape[0], padded(KV)))
        expect("slot", slot, (rows,), "i32")
        starts = [Q, heads.k_off, heads.k_off + KV]
        if heads.v_off is not None:
            starts += [heads.v_off, heads.v_off + KV]
    if heads.rot:
        expect("position", position, (rows,), "i32")
        expect("table", table, (1, heads.table_width))
    if starts != sorted(starts) or starts[-1] > ld:
        raise ValueError(
            f"qkv ({qkv.label}): {ld} columns do not hold q [0, {Q}), k from {heads.k_off} and v from {heads.v_off} "
            f"({KV} each) one after another"
        )
    return ld


def _record_plain(plan, entry, heads: Heads, rows, ld, table, **tensors):
    ldq, ldkv = padded(heads.q_width), padded(heads.kv_width)
    sizes = {"ld": ld, "Q": heads.q_width, "KV": heads.kv_width, "k_off": heads.k_off, "v_off": heads.v_off}
    sizes |= {"ldq": ldq, "ldkv": ldkv}
    half = heads.head_dim // 2
    unit = 4 if all(n % 4 == 0 for n in (half, *sizes.values())) else 1
    blocks = -(-(ldq + 2 * ldkv if entry == "forward" else ld) // (unit * WG))
    limits = {"rows": rows, "blocks": blocks, "cache_rows": _cache_rows(tensors), "positions": table.shape[0]}
    plan.record(
        "rope",
        entry,
        fold(rows * blocks),
        params={name: n // unit for name, n in sizes.items()} | limits,
        overrides={"HALF": half // unit},
        template={"element": "vec4<f32>" if unit == 4 else "f32"},
        table=table,
        **tensors,
    )


def _record_heads(plan, entry, heads: Heads, rows, ld, parts: Parts, constants, **tensors):
    options, sizes = _options(heads, parts), _sizes(heads, ld)
    wide = all(n % 4 == 0 for n in (*sizes.values(), heads.head_dim // 2, heads.rot // 2))
    unit = 4 if wide else 1
    names = _bindings(options, entry)
    if "constants" in names:
        expect("constants", constants, (heads.constant_rows, ld))
    q_units, kv_units = (1, 1) if options["whole"] else (heads.heads, heads.kv_heads)
    q_units, kv_units = parts.q * q_units, parts.kv * kv_units
    units = q_units + kv_units * (1 if options["shared"] else 2)
    # A unit is a head, or all heads of q, k or v together; its lanes own pairs of its elements.
    most = max(parts.q * heads.heads, parts.kv * heads.kv_heads) if options["whole"] else 1
    pairs = most * heads.head_dim // 2 // unit
    lanes = min(LANES, 1 << (pairs - 1).bit_length())
    params = {"rows": rows, "units": units, "q_units": q_units, "kv_units": kv_units}
    params |= {"cache_rows": _cache_rows(tensors), "positions": tensors["table"].shape[0] if heads.rot else 0}
    plan.record(
        "rope_heads",
        entry,
        fold(-(-rows * units // (LANES // lanes))),
        params=params | {n: v // unit for n, v in sizes.items()} | {"eps": heads.eps, "v_scale": heads.v_scale},
        overrides={"HALF": heads.head_dim // 2 // unit, "TURN": heads.rot // 2 // unit},
        template=options | {"wide": wide, "wg": LANES, "lanes": lanes, "each": -(-pairs // lanes)},
        **{name: tensor for name, tensor in (tensors | {"constants": constants}).items() if name in names},
    )


def _sizes(heads: Heads, ld: int) -> dict:
    """Columns and widths in elements. What qkv does not hold begins at its end."""
    k_off, v_off = (ld if off is None else off for off in (heads.k_off, heads.v_off))
    widths = {"ldq": padded(heads.q_width), "ldkv": padded(heads.kv_width)}
    return {"ld": ld, "Q": heads.q_width, "KV": heads.kv_width, "k_off": k_off, "v_off": v_off} | widths


def _options(heads: Heads, parts: Parts) -> dict:
    """Template values of shaders/rope_heads.wgsl.j2 for these parts."""
    return {
        "q": parts.q,
        "kv": parts.kv,
        "shared": parts.kv and heads.v_off is None,
        "q_table": heads.q_table,
        "turns": "none" if not heads.rot else "whole" if heads.rot == heads.head_dim else "part",
        "norm": heads.norm is not None,
        "whole": heads.norm == "row",
        "v_norm": parts.kv and heads.v_norm,
        "bias": heads.bias,
    }


def _bindings(options: dict, entry: str) -> set:
    """The names of the buffers that an entry point uses."""
    reads_x = entry == "forward" or options["norm"] or options["v_norm"]
    by_part = {"forward": (("q",), ("kcache", "vcache")), "backward": (("dq",), ("dk", "dv"))}[entry]
    names = {"dqkv"} if entry == "backward" else set()
    names |= {*by_part[0]} if options["q"] else set()
    names |= {*by_part[1], "slot"} if options["kv"] else set()
    names |= {"position", "table"} if options["turns"] != "none" else set()
    names |= {"qkv"} if reads_x else set()
    return names | ({"constants"} if reads_x and (options["norm"] or options["bias"]) else set())


def _cache_rows(tensors: dict) -> int:
    k = tensors["kcache"] if "kcache" in tensors else tensors["dk"]
    return k.shape[0] if k else 0
