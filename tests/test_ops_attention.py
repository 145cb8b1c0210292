"""Attention kernels against the float64 reference, and chain against flash, at odd and real shapes."""

import numpy as np
import pytest

from lorawgpu.errors import UserError
from lorawgpu.families.keys import SIZE_LIMITS
from lorawgpu.gpu import KernelCache, Plan, padded
from lorawgpu.ops import attention_decode, attention_flash
from lorawgpu.ops.attention import MAX_HEAD_DIM, attention_backward, attention_forward, log_sum_exp
from lorawgpu.reference import attention as reference

IMPLS = ["chain", "flash"]
NAMES = ("out", "lse", "dq", "dk", "dv")
POISON = 7777.0
# float32 sums of a few hundred terms of order 1, exp2 good to a few units in the last place
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def kernels(device):
    return KernelCache(device)


class Workspace:
    """Lends scratch of NaN, so that a kernel that reads what it never wrote is caught."""

    def __init__(self, device):
        self.device = device

    def take(self, shape, dtype, label):
        t = self.device.tensor(shape, dtype, label)
        self.device.write(t, np.full(t.nbytes // 4, 0x7FC00000, np.uint32).view(np.float32 if dtype == "f32" else "u4"))
        return t

    def give(self, tensor):
        pass


class Case:
    """Random sequences of the given lengths, flat, with tail tokens up to the capacity; values of the size `gain`."""

    def __init__(self, lengths, heads, kv_heads, head_dim, tail=0, spare=0, gain=1.0, window=None, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.scale = heads, kv_heads, head_dim, head_dim**-0.5
        bounds = np.cumsum([0, *lengths])
        self.rows = bounds[-1] + tail
        self.slots = self.rows + spare
        self.slot = np.arange(self.rows, dtype=np.uint32)
        self.kv_start = self.slot.copy()
        self.segment_end = np.zeros(self.slots, np.uint32)
        self.segment_end[: self.rows] = self.slot + 1
        for start, end in zip(bounds, bounds[1:], strict=False):
            self.kv_start[start:end] = start
            self.segment_end[start:end] = end
        if window:
            self.kv_start = np.maximum(self.kv_start, self.slot - np.minimum(self.slot, window - 1))
        self.q, self.dout = (gain * rng.standard_normal((self.rows, heads * head_dim)) for _ in range(2))
        self.k, self.v = (gain * rng.standard_normal((self.slots, kv_heads * head_dim)) for _ in range(2))
        for name in ("q", "k", "v", "dout"):  # the reference sees what the kernels see
            setattr(self, name, getattr(self, name).astype(np.float32).astype(np.float64))

    def reference(self):
        """-> out, lse, dq, dk, dv"""
        sizes = self.heads, self.kv_heads, self.scale
        out, lse = reference.attention_forward(self.q, self.k, self.v, self.slot, self.kv_start, *sizes)
        grads = reference.attention_backward(
            self.dout, self.q, self.k, self.v, out, lse, self.slot, self.kv_start, *sizes
        )
        return out, lse.T, *grads


def wide(x):
    """Padding columns of zeros."""
    x = np.asarray(x, np.float32)
    return np.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1])))


class Guarded:
    """An output inside a larger poisoned buffer, to see that its neighbours stay intact."""

    def __init__(self, device, shape, label):
        self.device, gap = device, 64
        start = padded(gap, 64)
        size = int(np.prod(shape))
        self.whole = device.tensor((start + size + gap,), "f32", label)
        device.write(self.whole, np.full(self.whole.shape, POISON, np.float32))
        self.tensor = self.whole.view(start, shape, label)
        self.start, self.size, self.shape = start, size, shape

    def read(self, width):
        """The logical columns; AssertionError when padding or neighbours are not as they must be."""
        whole = self.device.read(self.whole)
        assert (whole[: self.start] == POISON).all() and (whole[self.start + self.size :] == POISON).all()
        x = whole[self.start : self.start + self.size].reshape(self.shape)
        assert (x[:, width:] == 0).all()
        return x[:, :width]


def run(device, kernels, case, impl, backward=True):
    """-> out, lse[, dq, dk, dv] of the kernels."""
    up = device.upload
    q, dout, k, v = (up(wide(getattr(case, n)), label=n) for n in ("q", "dout", "k", "v"))
    slot, kv_start, segment_end = (
        up(getattr(case, n).astype(np.uint32), label=n) for n in ("slot", "kv_start", "segment_end")
    )
    rows, slots = q.shape, k.shape
    made = {
        n: Guarded(device, s, n)
        for n, s in {"out": rows, "lse": (rows[0], 2 * case.heads), "dq": rows, "dk": slots, "dv": slots}.items()
    }
    out, lse, dq, dk, dv = (made[n].tensor for n in made)
    options = {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "scale": case.scale,
        "impl": impl,
        "workspace": Workspace(device),
    }
    plan = Plan(device, kernels)
    with plan.section("both"):
        attention_forward(plan, out, lse, q, k, v, slot, kv_start, **options)
        if backward:
            attention_backward(plan, dq, dk, dv, dout, out, lse, q, k, v, slot, kv_start, segment_end, **options)
    plan.run("both")
    nq, nkv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    widths = {"out": nq, "lse": 2 * case.heads, "dq": nq, "dk": nkv, "dv": nkv}
    return [made[n].read(w) for n, w in list(widths.items())[: 5 if backward else 2]]


def check(got, want, tolerance=TOLERANCE):
    for name, g, w in zip(NAMES, got, want, strict=False):
        g, w = (log_sum_exp(x) if name == "lse" and x.dtype == np.float32 else x for x in (g, w))
        error = np.abs(g - w).max() / max(1.0, np.abs(w).max())
        assert np.isfinite(g).all() and error < tolerance, f"{name}: error {error:.1e}"


CASES = {
    "one token": Case([1], 1, 1, 8),
    "3 tokens, HD 8": Case([3], 1, 1, 8),
    "33, HD 6, GQA 4/1": Case([33], 4, 1, 6, tail=4),
    "17 in 3, GQA 9/3": Case([5, 1, 11], 9, 3, 16, tail=2),
    "70 in 2, HD 64": Case([41, 29], 3, 1, 64, tail=3, spare=9),
    "130 in 4, GQA 20/5, HD 16": Case([100, 1, 16, 13], 20, 5, 16, tail=5),
    "130, HD 128": Case([130], 3, 1, 128),
    "75, HD 80": Case([70, 5], 2, 1, 80),
    "40, HD 256": Case([40], 1, 1, 256),
    "window, HD 32": Case([90, 30], 3, 1, 32, window=20),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(device, kernels, name, impl):
    check(run(device, kernels, CASES[name], impl), CASES[name].reference())


@pytest.mark.parametrize("name", ["70 in 2, HD 64", "130, HD 128", "130 in 4, GQA 20/5, HD 16"])
def test_gradients_summed_in_one_part(device, kernels, monkeypatch, name):
    """What many rows need; CASES have so few that each walk takes some blocks only."""
    monkeypatch.setattr(attention_flash, "ENOUGH_FOR_GROUPS", 0)
    monkeypatch.setattr(attention_flash, "ENOUGH_WORKGROUPS", 0)
    check(run(device, kernels, CASES[name], "flash"), CASES[name].reference())


@pytest.mark.parametrize("impl", IMPLS)
def test_one_query_sees_a_longer_cache_and_nothing_else(device, kernels, impl):
    """Slots that no row sees may hold anything: a cache is not written to its end."""
    case = Case([601], 6, 2, 16)
    case.q, case.rows, case.slot, case.kv_start = case.q[:1], 1, np.array([500]), np.array([90])
    want = reference.attention_forward(case.q, case.k, case.v, case.slot, case.kv_start, 6, 2, case.scale)
    for x in (case.k, case.v):
        x[:90], x[501:] = np.nan, np.nan
    check(run(device, kernels, case, impl, backward=False), (want[0], want[1].T))


@pytest.mark.parametrize("impl", IMPLS)
def test_new_tokens_of_several_sequences_with_slots_of_their_own(device, kernels, impl):
    case = Case([300], 6, 2, 16)
    case.slot = np.array([17, 18, 19, 100, 250, 251])
    case.kv_start = np.array([0, 0, 0, 100, 200, 200])
    case.q, case.rows = case.q[:6], 6
    want = reference.attention_forward(case.q, case.k, case.v, case.slot, case.kv_start, 6, 2, case.scale)
    check(run(device, kernels, case, impl, backward=False), (want[0], want[1].T))


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(device, kernels, impl):
    """Scores of 1e4: a softmax that forgets its maximum overflows. Their rounding, 1e-3, is the tolerance."""
    case = Case([50, 20], 6, 2, 16, gain=60.0)
    check(run(device, kernels, case, impl), case.reference(), 5e-3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", [(4, 2, 16), (3, 1, 64), (2, 1, 10)], ids=str)
def test_a_row_that_sees_one_key_has_no_gradient_of_its_query(device, kernels, impl, sizes):
    """Its weight is 1 whatever its query is. Exactly 0: of a rounding error Adam would make a whole step."""
    case = Case([2, 1, 9], *sizes, tail=4)
    got = run(device, kernels, case, impl)
    one = case.kv_start == case.slot
    assert (got[2][one] == 0).all() and (got[2][~one] != 0).all()
    check(got, case.reference())


@pytest.mark.parametrize("impl", IMPLS)
def test_two_runs_give_identical_bits(device, kernels, impl):
    case = Case([41, 29], 6, 2, 16, tail=3)
    first, second = (run(device, kernels, case, impl) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_chain_and_flash_agree(device, kernels):
    case = Case([41, 29], 6, 2, 16, tail=3, spare=2, seed=1)
    check(run(device, kernels, case, "chain"), run(device, kernels, case, "flash"))


AROUND = {  # lengths before, lengths after, tail, spare slots
    "second of three": ([37], [29], 0, 0),
    "another capacity": ([], [], 150, 40),
    "after short ones": ([1, 1, 5, 3, 1], [2, 1, 90], 3, 0),
    "at a block's end": ([64, 63], [1], 1, 1),
    "long neighbours": ([131], [140], 0, 0),
}


@pytest.mark.parametrize("sizes", [(6, 2, 16), (3, 1, 32), (3, 1, 64), (3, 1, 128)], ids=str)
def test_a_row_keeps_its_bits_whatever_surrounds_it(device, kernels, sizes):
    """Output and saved statistics: neither place, nor capacity, nor neighbours."""
    alone = Case([75], *sizes)
    want = run(device, kernels, alone, "flash", backward=False)
    for seed, (name, (before, after, tail, spare)) in enumerate(AROUND.items(), 1):
        crowd = Case([*before, 75, *after], *sizes, tail=tail, spare=spare, seed=seed)
        rows = slice(sum(before), sum(before) + 75)
        for x in ("q", "k", "v"):
            getattr(crowd, x)[rows] = getattr(alone, x)
        got = run(device, kernels, crowd, "flash", backward=False)
        assert all(g[rows].tobytes() == w.tobytes() for g, w in zip(got, want, strict=True)), name


def test_new_tokens_keep_their_bits_and_see_only_their_own_slots(device, kernels):
    """As in generation: each sequence owns slots; what lies between was never written."""
    alone = Case([75], 6, 2, 16)
    want = run(device, kernels, alone, "flash", backward=False)
    crowd = Case([900], 6, 2, 16)
    crowd.k[:], crowd.v[:] = np.nan, np.nan
    starts = np.array([301, 100, 777])
    for start in starts:
        crowd.k[start : start + 75], crowd.v[start : start + 75] = alone.k, alone.v
    new = np.arange(70, 75)
    crowd.rows = 3 * len(new)
    crowd.slot, crowd.kv_start = (starts[:, None] + new).ravel(), starts.repeat(len(new))
    crowd.q = np.tile(alone.q[new], (3, 1))
    got = run(device, kernels, crowd, "flash", backward=False)
    for g, w in zip(got, want, strict=True):
        assert g.reshape(3, len(new), -1).tobytes() == np.stack([w[new]] * 3).tobytes()


@pytest.mark.parametrize("impl", IMPLS)
def test_two_records_in_one_submit_keep_their_own_scale(device, kernels, impl):
    case = Case([20], 6, 2, 16)
    q, k, v = (device.upload(wide(getattr(case, n)), label=n) for n in "qkv")
    slot, kv_start = (device.upload(getattr(case, n).astype(np.uint32)) for n in ("slot", "kv_start"))
    outs = [device.tensor(q.shape, "f32", "out") for _ in range(2)]
    lse = device.tensor((case.rows, 12), "f32", "lse")
    plan = Plan(device, kernels)
    with plan.section("both"):
        for out, scale in zip(outs, (0.1, 0.9), strict=True):
            attention_forward(
                plan,
                out,
                lse,
                q,
                k,
                v,
                slot,
                kv_start,
                heads=6,
                kv_heads=2,
                head_dim=16,
                scale=scale,
                workspace=Workspace(device),
                impl=impl,
            )
    plan.run("both")
    for out, scale in zip(outs, (0.1, 0.9), strict=True):
        want, _ = reference.attention_forward(case.q, case.k, case.v, case.slot, case.kv_start, 6, 2, scale)
        check([device.read(out)], [want])


def test_a_shape_that_does_not_fit_is_named(device, kernels):
    q, k = device.tensor((4, 96), "f32", "q"), device.tensor((4, 32), "f32", "keys")
    row, lse = device.tensor((4,), "u32", "slot"), device.tensor((4, 10), "f32", "lse of layer 3")
    with pytest.raises(ValueError, match=r"lse of layer 3 has shape \(4, 10\), want \(4, 12\)"):
        attention_forward(
            Plan(device, kernels),
            q,
            lse,
            q,
            k,
            k,
            row,
            row,
            heads=6,
            kv_heads=2,
            head_dim=16,
            scale=1.0,
            workspace=None,
        )


def test_a_softcap_is_refused_by_name(device, kernels):
    with pytest.raises(UserError, match="attn_softcap"):
        attention_forward(
            Plan(device, kernels), *[None] * 7, heads=1, kv_heads=1, head_dim=8, scale=1.0, workspace=None, softcap=30.0
        )


def test_a_config_may_have_the_heads_that_every_kernel_has_a_tile_for_and_no_larger():
    assert {max(tiles) for tiles in attention_flash.TILES.values()} == {MAX_HEAD_DIM}
    assert attention_decode.fits(MAX_HEAD_DIM) and not attention_decode.fits(MAX_HEAD_DIM + 8)
    assert SIZE_LIMITS["head_dim"] == MAX_HEAD_DIM
