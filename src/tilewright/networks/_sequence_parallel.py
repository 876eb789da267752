"""A video network whose tokens are shared out among processes."""

import math
from typing import NamedTuple

from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.models import wan as pattern
from tilewright.networks import wan
from tilewright.networks.video_attentions import Video
from tilewright.slices import parallel


class _OwnAttention(NamedTuple):
    """An attention of `video_attentions`, made for a rank's heads, between the exchanges."""

    attention: object
    sharding: parallel.Sharding

    def __call__(self, q, k, v, call):
        return self.sharding.attend(q, k, v, lambda *whole: self.attention(*whole, call))


class _OwnClip(NamedTuple):
    """Of a clip what a rank's tokens need, with the fields and methods that the network uses. whole: of all tokens."""

    attention: _OwnAttention
    angles: list[Tensor]
    whole: "wan._Clip"

    def ordered(self, x):
        return self.attention.sharding.own(self.whole.ordered(x))

    def raster(self, x):
        return self.whole.raster(self.attention.sharding.gather(x))


class _Shared(wan.Network):
    """See `shared`."""

    def _made(self, grid, device):
        whole = super()._made(grid, device)
        size = self.options.published
        sharding = parallel.shard(math.prod(grid), size.heads, self.group)
        video = Video(grid, sharding.heads[sharding.rank], pattern.HEAD_DIM, self.options.depth)
        attention = _OwnAttention(self._member.Attention(self.settings, video), sharding)
        # The attention of all heads only told the order.
        return _OwnClip(attention, [sharding.own(x, 0) for x in whole.angles], whole._replace(attention=None))


def shared(network, group):
    """See `networks.sequence_parallel`."""
    if not isinstance(network, wan.Network):
        raise ConfigError(f"expected a network of videos, as create_video makes it, found {type(network).__name__}")
    other = _Shared.__new__(_Shared)
    other.__dict__.update(network.__dict__)
    other.group, other._clips = group, {}
    return other
