"""Pieces of the kernels in which warps gather keys and values beside warps that multiply.

Stages of shared memory pass from one to the other; barriers say who may read or fill them. Names are those of the
literature, see `online_softmax`: s are scores, w their weights in 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

# Warps that gather.
GATHERING = gl.constexpr(4)


@gluon.jit
def next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    """The stage after this one, and its phase."""
    last = stage == NUM_STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def weighted(w, acc, v_mem, v_full, stage, phase):
    """Start to add the weighted values of a stage, once these are there."""
    mbarrier.wait(v_full.index(stage), phase)
    # What copies wrote is seen by the tensor cores after this alone.
    fence_async_shared()
    return warpgroup_mma(w, v_mem.index(stage), acc, is_async=True)


@gluon.jit
def softmax(s, m_i, l_i, scale_log2, dtype: gl.constexpr, BOUNDED: gl.constexpr):
    """``(weights as an operand of the next product, m_i, l_i, alpha)`` after scores of a step.

    BOUNDED: all scores stay below m_i, and alpha is 1.
    """
    row_at: gl.constexpr = m_i.type.layout
    m_new = m_i
    if not BOUNDED:
        m_new = gl.maximum(m_i, gl.convert_layout(gl.max(s, 1), row_at) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.convert_layout(m_new, gl.SliceLayout(1, s.type.layout))[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = (l_i if BOUNDED else l_i * alpha) + gl.convert_layout(gl.sum(p, 1), row_at)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, row_at.parent, 2)), m_new, l_i, alpha
