"""Check a forward and all its gradients by central differences of fourth order, in float64."""

import numpy as np

# Fourth-order differences err by step^4 times the fifth derivative and by rounding, 1e-16 / step = 1e-11. (A whole
# model curves so much that second-order ones are off by 5e-6 at this step.) A missing term is off by 1e-2 or more.
STEP, TOLERANCE = 1e-5, 1e-7


def relative_error(got, expected):
    """||got - expected|| / ||expected||, absolute when nothing is expected."""
    return np.linalg.norm(got - expected) / (np.linalg.norm(expected) or 1.0)


def numeric_gradient(loss, x, step=STEP):
    """d loss() / dx for a loss that reads the array x, which is nudged in place one element at a time."""
    grad = np.empty(x.shape)
    for i in np.ndindex(x.shape):
        kept, at = x[i], {}
        for offset in (-2, -1, 1, 2):
            x[i] = kept + offset * step
            at[offset] = loss()
        x[i] = kept
        grad[i] = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
    return grad


def gradient_errors(forward, backward, inputs):
    """Relative error of every gradient.

    forward(**inputs) -> y; backward(dy, **inputs) -> {input name: gradient}; inputs: float64 arrays by name.
    The loss is sum(dy * y) with a random dy, so no gradient can hide behind a symmetry.
    """
    dy = np.random.default_rng(1).standard_normal(np.shape(forward(**inputs)))
    grads = backward(dy, **inputs)
    return {
        name: relative_error(grad, numeric_gradient(lambda: (dy * forward(**inputs)).sum(), inputs[name]))
        for name, grad in grads.items()
    }


def check_gradients(forward, backward, inputs, tolerance=TOLERANCE):
    """AssertionError naming every gradient that central differences do not confirm."""
    errors = gradient_errors(forward, backward, inputs)
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert errors and not wrong, f"gradients off by {wrong or 'nothing: none was returned'}; allowed {tolerance}"


def wrong_backwards(backward, names):
    """The backward with one of the named gradients zeroed or negated at a time: (label, backward) pairs."""
    for name in names:
        for label, factor in (("zero", 0.0), ("negated", -1.0)):

            def broken(dy, name=name, factor=factor, **inputs):
                grads = backward(dy, **inputs)
                return {**grads, name: factor * grads[name]}

            yield f"{name} {label}", broken
