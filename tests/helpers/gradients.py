"""Gradients of a module's parameters, and whether two sets of them agree."""

import torch

# Of float32, relative to the norm of a parameter's gradient. Gradients pass through a few layers of rounded products.
TOLERANCE = 1e-5


def of(module, call, x):
    """``{name: gradient}`` of the parameters of `module`, and of x, for the output of ``call(x)``."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = call(x)
    # The same weights in every type.
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    (out * weights.to(out.dtype)).sum().backward()
    return {"x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}


def agree(found, wanted, tolerance=TOLERANCE):
    """Assert that two sets of gradients agree. One that is missing must be missing in both."""
    assert found.keys() == wanted.keys()
    assert any(x is not None and x.any() for x in wanted.values())
    # Some are rounding alone, such as that of a bias of keys, which no softmax sees: it is that of the largest ones.
    least = 1e-2 * max(x.norm() for x in wanted.values() if x is not None)
    for name, y in wanted.items():
        assert (found[name] is None) == (y is None), name
        if y is not None:
            error = (found[name].double() - y.double()).norm() / max(y.norm(), least)
            assert error <= tolerance, f"{name}: {error:.2e}"
