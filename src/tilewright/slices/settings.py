"""Which keys lists hold, stated as data: what a configuration, a network or an adapter hands to `slices.predict`."""

from typing import Annotated, Any

import msgspec

from tilewright.slices import predictors

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
# Attention that lists are to hold where nothing is stated, and the share of the keys that they hold at most.
MASS, MOST = 0.95, 0.4
# How many keys lists hold, and have room for.
AMOUNTS = ("budget", "mass", "keep", "threshold")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `slices.predict` takes, by its names. budget: the share of keys that a list has room for; None: as much as
    `keep` allows, else all keys.

    mass, keep, threshold: which keys are listed; where none is stated, mass 0.95 and at most the keys of the budget, or
    a share of 0.4. predictor: settings of the predictor `by`, such as ``{"pool": 32}``.
    """

    by: str = "pooled"
    budget: Share | None = None
    mass: Share | None = None
    keep: Share | None = None
    threshold: Share | None = None
    rows: int = 128
    width: int = 1
    least: int | None = None
    predictor: dict[str, Any] = {}

    def __post_init__(self) -> None:
        predictors.parse(self.by, self.predictor)

    @property
    def stated(self) -> dict[str, Any]:
        """Keywords of `slices.predict`."""
        known = msgspec.structs.asdict(self)
        settings = known.pop("predictor")
        if self.mass is self.keep is self.threshold is None and self.by != "given":
            known |= {"mass": MASS, "keep": self.budget or MOST}
        known["budget"] = self.budget or known["keep"] or 1.0
        return {name: value for name, value in known.items() if value is not None} | settings
