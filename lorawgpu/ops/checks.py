"""Shared by all op wrappers: shape checks, and grids folded into two dimensions."""

from lorawgpu.gpu import Tensor, padded

WG = 256  # threads per workgroup of the element-wise kernels
STATE_WORDS = 16  # words in the `state` buffer; shaders/step_state.wgsl lists them


def expect(name: str, tensor: Tensor, shape: tuple, *dtypes: str):
    """ValueError unless `tensor` has `shape` and one of `dtypes` (default: f32).

    Its first axis may be longer, because buffers have spare rows.
    """
    dtypes = dtypes or ("f32",)
    fits = len(tensor.shape) == len(shape) and tensor.shape[0] >= shape[0] and tensor.shape[1:] == shape[1:]
    if not fits or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} ({tensor.label}): got {tensor.dtype} {list(tensor.shape)}, "
            f"wanted {' or '.join(dtypes)} {list(shape)}, first axis at least that long"
        )


def expect_state(state: Tensor):
    """Check the buffer of ops.step_state.state_buffer."""
    expect("state", state, (STATE_WORDS,), "u32")


def expect_rows(rows: int, width: int, **tensors: Tensor) -> int:
    """Check f32 activations of `rows` x `width`. Returns their row stride, padded(width)."""
    for name, tensor in tensors.items():
        expect(name, tensor, (rows, padded(width)))
    return padded(width)


def fold(groups: int) -> tuple:
    """`groups` workgroups as a 2D grid, because a dimension holds at most 65535. The last row may overhang."""
    x = min(groups, 32768)
    return (x, -(-groups // x)) if groups else (0, 1)


def fold_elements(count: int, per_thread: int = 4) -> tuple:
    """The grid of an element-wise kernel for `count` elements, `per_thread` (one vec4) per thread."""
    return fold(-(-count // (WG * per_thread)))
