"""`padded`, attended product by product, as "Dispatch-Aware Ragged Attention for Pruned Vision Transformers" (arXiv
2604.15408) has the baseline that its speed-ups are over and that it calls padded SDPA."""

from functools import partial

from tilewright.networks.batching import padded
from tilewright.networks.token_layouts import Rectangle

ROOM = None


class _Unfused(Rectangle):
    def attend(self, q, k, v):
        """See `Rectangle`; scores and weights of all positions go through memory."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return ((scores + self.additive(q)).softmax(-1) @ v).transpose(1, 2)


narrow = partial(padded.narrow, rectangle=_Unfused)
