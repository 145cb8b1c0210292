"""Gather and its scatter: exact, in chunks, and blind to rows without a target."""

import numpy as np
from oplab import POISON, Lab, normal, pad

from lorawgpu.ops.gather import gather_backward, gather_forward
from lorawgpu.reference import gather as reference


def case(lab, M, width, index, target_ids, chunk):
    index, target_ids = np.asarray(index, np.int32), np.asarray(target_ids, np.int32)
    chunks = -(-len(index) // chunk)
    x, dy = normal(M, width), normal(chunks * chunk, width, seed=1)
    gx, gindex, gtargets = lab.padded(x), lab.input(index), lab.input(target_ids)
    ys, dx = [lab.rows(chunk, width) for _ in range(chunks)], lab.rows(M, width)
    for i, y in enumerate(ys):
        at = slice(i * chunk, (i + 1) * chunk)
        shape = {"start": i * chunk, "rows": chunk, "width": width}
        gather_forward(lab.plan, y.tensor, gx, gindex, gtargets, **shape)
        gather_backward(lab.plan, dx.whole.view(64, (M, gx.shape[1])), lab.padded(dy[at]), gindex, gtargets, **shape)

    def check():
        used = target_ids >= 0
        want = np.zeros((chunks * chunk, gx.shape[1]), np.float32)
        want[: len(index)][used] = pad(reference.gather_forward(x, index[used]))
        assert np.array_equal(np.concatenate([y.value for y in ys]), want)
        want_dx = np.full(dx.shape, POISON, np.float32)  # rows without a target stay untouched
        want_dx[index[used]] = pad(reference.gather_backward(dy[: len(index)][used], index[used], M))[index[used]]
        assert np.array_equal(dx.value, want_dx)

    return check


def test_is_exact(plan):
    lab = Lab(plan)
    with lab.section:
        checks = [
            case(lab, 9, 123, [1, 2, 5, 8, 0], [3, 0, 7, -1, -100], 2),  # the last chunk is longer than the list
            case(lab, 4, 2560, [3, 0], [1, 1], 2),
            case(lab, 3, 1, [2, 99, -1], [0, -1, -1], 3),  # an unused row may hold any index
        ]
    lab.run()
    for check in checks:
        check()
