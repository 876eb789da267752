"""What runs neighbourhood attention on each kind of device: ``neighborhood/<device>/launch.py``. Its functions:

``forward(q, k, v, rule, scale, extra, want_lse, bound) -> (out, lse or None)``: attention [B, *grid, H, D_v] of q
    [B, *grid, H, D], k [B, *grid, H_kv, D] and v [B, *grid, H_kv, D_v], of one type, with values of a head side by
    side; H_kv divides H. extra: keys and values [B, N, H_kv, D or D_v] that all queries see, or None. rule: a
    `rule.Rule` that fits the grid. lse: natural log-sum-exps, float32 [B, *grid, H]. Results are contiguous.
    bound: that no scaled score exceeds, or None; a device may make use of it.
``prepared(q, k, v, rule, scale, want_lse, bound)``: ``callable(q, k, v) -> (out, lse or None)`` for tensors of these
    layouts, without extra keys.
``backward(q, k, v, out, lse, grad, rule, scale, extra) -> (dq, dk, dv, dk_extra or None, dv_extra or None)``:
    gradients, contiguous, for the gradient of ``out``. Equal calls give equal bits.
``choose(rule, grid, heads, kv_heads, dim, v_dim, dtype) -> boxes.Choice``, optional: the box of queries that a call
    takes, in milliseconds for any grid.
``candidates(rule, grid, heads, kv_heads, dim, v_dim, dtype) -> [boxes.Candidate, …]``, optional: what is chosen from,
    the choice first, then by predicted time; ``forward(..., form=candidate.form)`` takes one.

Nothing else is checked there.
"""

from tilewright import devices

# By torch's name of their device.
LAUNCHES = devices.offering("neighborhood.launch")
