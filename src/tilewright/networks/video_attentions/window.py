"""Windows over frames, rows and columns, the same in every call: a plan, as of `tilewright.plan`.

The tokens stand in the plan's order. The plan is made in the first call and kept on disk, as for other networks.
"""

from typing import TYPE_CHECKING, Annotated

import msgspec

from tilewright.core.errors import ConfigError
from tilewright.masks import window3d
from tilewright.networks import attention_sites

if TYPE_CHECKING:
    import torch

    from tilewright.networks.video_attentions import Call, Video

Size = Annotated[int, msgspec.Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """window: frames, rows and columns of tokens around each, odd; it ends with the clip."""

    window: tuple[Size, Size, Size] = (5, 15, 15)

    def __post_init__(self) -> None:
        if any(size % 2 == 0 for size in self.window):
            raise ConfigError(f"window: expected odd numbers of tokens, found {'x'.join(map(str, self.window))}")


class Attention:
    """See the contract of the package."""

    stateful = False

    def __init__(self, settings: Settings, video: "Video"):
        """The pattern, and its order; planning waits for the first call, which tells type and device."""
        params = window3d.Params(grid=video.grid, window=settings.window, heads=video.heads, head_dim=video.head_dim)
        site = attention_sites.Site(
            "tilewright", lambda: window3d.graph(params), video.heads, video.head_dim, native=None
        )
        self.order = site.order
        self._attend = site.layer()

    def __call__(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", call: "Call | None") -> "torch.Tensor":
        """Attend; all layers share the plan."""
        return self._attend(q, k, v)
