"""Which keys lists hold, stated as data: what a configuration, a network or an adapter hands to `slices.predict`."""

from typing import Annotated, Any

import msgspec

from tilewright.core.errors import ConfigError
from tilewright.slices import predictors

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
# A pass of a step, such as that with the prompt: by number, or by its name in a host.
Branch = int | str
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


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `slices.Steps` takes, by its names.

    shared: branches that take the lists of another, such as ``{1: 0}``. budgets: file of a table.
    """

    refresh: tuple[Number, ...] = (0, 15, 30, 45)
    first_dense: Number = 2
    dense_layers: Number = 0
    shared: dict[Branch, Branch] = {}
    packed: bool = True
    delta: bool = False
    rest: bool = False
    budgets: str | None = None
    most_bytes: Number | None = None


class Stepped(Settings, frozen=True, forbid_unknown_fields=True):
    """See `Settings`. steps: keep lists across the steps of a sampler; None: predict in each call."""

    steps: Steps | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for amounts of keys beside a table."""
        super().__post_init__()
        found = [name for name in AMOUNTS if getattr(self, name) is not None]
        if found and self.steps is not None and self.steps.budgets:
            raise ConfigError(f"budgets: expected a table in place of {', '.join(found)}, found both")

    @property
    def stated(self) -> dict[str, Any]:
        """Keywords of `slices.predict`; a table has amounts of its own."""
        left = ("steps", *AMOUNTS) if self.steps is not None and self.steps.budgets else ("steps",)
        return {name: value for name, value in super().stated.items() if name not in left}
