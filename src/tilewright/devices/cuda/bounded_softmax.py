"""A step of softmax whose scores have a bound: no maximum is looked for. Names are those of `online_softmax`."""

import triton
import triton.language as tl


@triton.jit
def update_below(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1: tl.constexpr):
    """As `online_softmax.update`, of scores that stay below m_i."""
    b_p = tl.exp2(b_s * scale_log2 - m_i[:, None])
    l_i += tl.sum(b_p, 1)
    b_w = b_p.to(b_v0.dtype)
    acc0 = tl.dot(b_w, b_v0, acc0, input_precision="ieee")
    if D1:
        acc1 = tl.dot(b_w, b_v1, acc1, input_precision="ieee")
    return m_i, l_i, acc0, acc1
