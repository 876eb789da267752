"""The two products of an MLP-Mixer's block without its nonlinearity, for four windows; the size is a window's tokens.

Channels are mixed, then tokens (Tolstikhin et al., 2021). The second product needs all tokens of a window: while it
works on one, the first fills the other half of a double buffer with the next.
"""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Reduce, Stage

SIZE = 32
WINDOWS, CHANNELS, OUT = 4, 8, 4


def outputs(size):
    """tokens, 4 × size × 4; the weights of both are data."""
    at_least("mixer", size, 8)
    image = Input("in", (WINDOWS, size, CHANNELS))
    by_channel = Input("weights_channels", (CHANNELS, OUT), unroll=(1,))
    by_token = Input("weights_tokens", (size, size))
    channels = Stage(
        "channels",
        (WINDOWS, size, OUT),
        lambda b, t, c: Reduce((CHANNELS,), lambda k: image[b, t, k] * by_channel[k, c]),
        unroll=(2,),
    )
    return (
        Stage(
            "tokens",
            (WINDOWS, size, OUT),
            lambda b, t, c: Reduce((size,), lambda k: channels[b, k, c] * by_token[t, k]),
            unroll=(2,),
        ),
    )
