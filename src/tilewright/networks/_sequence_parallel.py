"""A video network whose tokens are shared out among processes."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import wan
from tilewright.networks.video_attentions import Video
from tilewright.slices import parallel

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class _OwnAttention(NamedTuple):
    """An attention of `video_attentions`, made for a rank's heads, between the exchanges."""

    attention: Any
    sharding: parallel.Sharding

    @property
    def stateful(self):
        return self.attention.stateful

    def check_run(self, **found):
        self.attention.check_run(**found)

    def __call__(self, q, k, v, call):
        return self.sharding.attend(q, k, v, lambda *whole: self.attention(*whole, call))


class _OwnClip(NamedTuple):
    """Of a clip what a rank's tokens need, with the fields and methods that the network uses. whole: of all tokens."""

    layers: list
    now: dict
    angles: list[Tensor]
    sharding: parallel.Sharding
    whole: "wan._Clip"

    def ordered(self, x):
        return self.sharding.own(self.whole.ordered(x))

    def raster(self, x):
        return self.whole.raster(self.sharding.gather(x))


class _Shared(wan.Network):
    """See `shared`."""

    group: "ProcessGroup | None"

    def _made(self, grid, device):
        whole = super()._made(grid, device)
        size = self.options.published
        sharding = parallel.shard(math.prod(grid), size.heads, self.group)  # type: ignore[arg-type]  # torch's modules do not tell the types of what they hold
        video = Video(grid, sharding.heads[sharding.rank], pattern.HEAD_DIM, self.options.depth)
        attention = _OwnAttention(self._makes(self.settings, video), sharding)
        layers = [wan._Layer(attention, layer, whole.now) for layer in range(self.options.depth)]
        # The attention of all heads only told the order.
        whole = whole._replace(layers=None)
        return _OwnClip(layers, whole.now, [sharding.own(x, 0) for x in whole.angles], sharding, whole)


def shared(network: "torch.nn.Module", group: "ProcessGroup | None") -> _Shared:
    """See `networks.sequence_parallel`."""
    if not isinstance(network, wan.Network):
        raise ConfigError(f"expected a network of videos, as create_video makes it, found {type(network).__name__}")
    other = _Shared.__new__(_Shared)
    other.__dict__.update(network.__dict__)
    other.group, other._clips = group, {}
    return other
