"""Attention by lists of single keys for groups of 128 queries, predicted on the device in each call or some steps."""

from typing import TYPE_CHECKING, Any

import msgspec

from tilewright import slices
from tilewright.slices import settings

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.networks.video_attentions import Call, Video


Settings = settings.Stepped


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
