"""What runs slices on each kind of device: ``slices/<device>``. Contract of the folder:

``executor.py``, optional: attention of groups of queries to lists of keys. A device without it runs no slices.
    ``Executor(layout, device)``, for a `slices.layout.Layout`. Tensors are those of `slices.layout.SliceLists`; nothing
    waits for the device. Its methods:
    ``from_mask(mask) -> (keys, counts, order, state)``: lists of the keys that bool [B or 1, H or 1, G, N_k] flags, the
        flags of a group side by side.
    ``pack(keys, counts) -> bits``, ``unpack(bits) -> (keys, counts, order, state)``: see `SliceLists.pack`.
    ``rank(counts) -> (order, state)``, what follows from the counts of lists made elsewhere.
    ``attend(lists, q, k, v, *, scale, out=None, with_lse=False, bound=None) -> (out, lse or None)``: attention [B, H,
        N_q, D] and natural log-sum-exps, float32 [B, H, N_q]. lists: the four tensors. out: memory for the result, None
        for new. bound: what no score times `scale` exceeds, None where none is known; not used by all.
        Groups without keys give zeros and -inf. All is NaN where ``state`` says that a list did not fit. Raises
        `PatternError` or `DeviceError` for tensors other than the layout's, or that need a gradient.
    ``backward(lists, q, k, v, out, lse, grad, *, scale, lse_grad=None) -> (dq, dk, dv)``: gradients of what ``attend``
        returned, of its result `grad` [B, H, N_q, D] and of its log-sum-exps, float32 [B, H, N_q] or None. The lists
        are constants. All is NaN where the result was.

``selection.py``, beside ``executor.py``: which keys such lists hold, see `slices.selection`.
"""

from tilewright import devices

# By torch's name of their device.
EXECUTORS, SELECTIONS = devices.offering("slices.executor"), devices.offering("slices.selection")
