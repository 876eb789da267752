"""Attention by lists of single keys for groups of 128 queries, predicted on the device in each call or some steps."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tilewright import slices
from tilewright.core.errors import ConfigError
from tilewright.slices import settings as stated

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.networks.video_attentions import Call, Video

Number = Annotated[int, msgspec.Meta(ge=0)]


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `slices.Steps` takes, by its names.

    shared: branches that take the lists of another, such as ``{1: 0}``. budgets: file of a table.
    """

    refresh: tuple[Number, ...] = (0, 15, 30, 45)
    first_dense: Number = 2
    dense_layers: Number = 0
    shared: dict[int, int] = {}
    packed: bool = True
    delta: bool = False
    rest: bool = False
    budgets: str | None = None


class Settings(stated.Settings, frozen=True, forbid_unknown_fields=True):
    """See `slices.settings.Settings`. steps: keep lists across the steps of a sampler; None: predict in each call."""

    steps: Steps | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """Keywords of `slices.predict`."""
        # A table has amounts of its own.
        left = ("steps", *stated.AMOUNTS) if self.steps is not None and self.steps.budgets else ("steps",)
        return {name: value for name, value in super().stated.items() if name not in left}

    def __post_init__(self) -> None:
        """Raise `ConfigError` for amounts of keys beside a table."""
        super().__post_init__()
        found = [name for name in stated.AMOUNTS if getattr(self, name) is not None]
        if found and self.steps is not None and self.steps.budgets:
            raise ConfigError(f"budgets: expected a table in place of {', '.join(found)}, found both")


class Attention:
    """See the contract of the package."""

    order = None

    def __init__(self, settings: Settings, video: "Video"):
        """Nothing is prepared: layouts follow from the tensors."""
        self._stated = settings.stated
        steps = settings.steps
        self.steps = None if steps is None else slices.Steps(**msgspec.structs.asdict(steps), **self._stated)

    @property
    def stateful(self) -> bool:
        """Whether lists are kept."""
        return self.steps is not None

    def check_run(self, **found: Any) -> None:
        """Raise `PatternError` where a table is of another model or run, as `slices.Budgets.check`."""
        if self.steps is not None and self.steps.budgets is not None:
            self.steps.budgets.check(**found)

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor", call: "Call") -> "Tensor":
        """Attend by lists that are predicted now, or were at an earlier step."""
        if self.steps is not None:
            return self.steps(call.layer, call.step, call.branch, q, k, v)
        return slices.attend(q, k, v, slices.predict(q, k, **self._stated))
