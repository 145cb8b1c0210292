"""What every op wrapper does before it records: check shapes, and fold a long grid into two dimensions."""

from lorawgpu.gpu import Tensor, padded

WG = 256  # threads a workgroup of the element-wise kernels
STATE_WORDS = 16  # of the `state` buffer; what they hold: shaders/step_state.wgsl


def expect(name: str, tensor: Tensor, shape: tuple, *dtypes: str):
    """ValueError unless `tensor` has `shape` (its first axis may be longer: buffers have spare rows) and a dtype
    of `dtypes` (f32 when none is given)."""
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
    """Check f32 activations of `rows` x `width`; returns their row stride padded(width)."""
    for name, tensor in tensors.items():
        expect(name, tensor, (rows, padded(width)))
    return padded(width)


def fold(groups: int) -> tuple:
    """`groups` workgroups as a 2D grid (a dimension holds 65535); the last row of it may overhang."""
    x = min(groups, 32768)
    return (x, -(-groups // x)) if groups else (0, 1)


def fold_elements(count: int, per_thread: int = 4) -> tuple:
    """The grid of an element-wise kernel: `count` elements, `per_thread` of them (one vec4) a thread."""
    return fold(-(-count // (WG * per_thread)))
