"""How many keys each head lists, by layer and part of a run: a table, made by measurement, that `Steps` reads.

`choice` chooses the shares under a limit of time, from errors and times that `measured` finds;
`tilewright.integrations.tuning` does both for a model.
"""

import bisect
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tilewright.core import arguments, artifacts
from tilewright.core.errors import ArtifactError, PatternError

KIND, VERSION = "slice budgets", 1
Count = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Budgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of the keys that each head lists, for one model, size of video and number of steps.

    Parameters
    ----------
    model : str
        Name of the model.
    shape : tuple of int
        Sizes of the latents of a video, without the batch.
    tokens : int
        Tokens that attend to each other, those of text included.
    steps : int
        Denoising steps of a run.
    begins : tuple of int
        First step of each part of a run; the first part begins at 0.
    keep : tuple
        Shares of the keys, ``keep[part][layer][head]``.

    Raises
    ------
    PatternError
        For parts that do not ascend from 0, and for layers or heads that differ between parts.

    Examples
    --------
    >>> from tilewright import slices
    >>> made = slices.Budgets("wan", (16, 3, 22, 36), 594, 30, (0, 10), (((0.1, 0.4),), ((0.1, 0.2),)))
    >>> made.layers, made.heads, made.of(12, 0)
    (1, 2, (0.1, 0.2))
    """

    model: str
    shape: tuple[Count, ...]
    tokens: Count
    steps: Count
    begins: tuple[Number, ...]
    keep: tuple[tuple[tuple[Share, ...], ...], ...]

    def __post_init__(self) -> None:
        """Raise `PatternError` for parts, layers and heads that do not fit each other."""
        begins = self.begins
        if not begins or begins[0] or list(begins) != sorted(set(begins)) or begins[-1] >= self.steps:
            raise PatternError(f"begins: expected steps that ascend from 0 to below {self.steps}, found {begins}")
        if len(self.keep) != len(begins) or len({tuple(map(len, part)) for part in self.keep}) > 1:
            raise PatternError(f"keep: expected the same layers and heads in {len(begins)} parts, found others")
        if len({len(heads) for part in self.keep for heads in part}) != 1 or not self.keep[0][0]:
            raise PatternError("keep: expected as many heads, one at least, in each layer, found others")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.keep[0])

    @property
    def heads(self) -> int:
        """Heads of a layer."""
        return len(self.keep[0][0])

    def part(self, step: int) -> int:
        """The part of a run that a step is in."""
        return bisect.bisect_right(self.begins, step) - 1

    def of(self, step: int, layer: int) -> tuple[float, ...]:
        """Shares of the keys that the heads of a layer list at a step."""
        return self.keep[self.part(step)][layer]

    def check(self, **found: Any) -> None:
        """Check that the table is for a model and a run.

        Parameters
        ----------
        **found
            What there is: some of ``model``, ``shape``, ``tokens``, ``steps``, ``layers`` and ``heads``.

        Raises
        ------
        PatternError
            For what differs from the table.
        """
        for name, value in found.items():
            expected = getattr(self, name)
            if (tuple(value) if isinstance(expected, tuple) else value) != expected:
                raise PatternError(
                    f"budgets of {self.model}: expected {name} {arguments.shown(expected)}, found "
                    f"{arguments.shown(value)}"
                )

    def check_call(self, layer: int, step: int, heads: int, tokens: int) -> None:
        """Raise `PatternError` for a call of attention that the table is not for."""
        if layer >= self.layers:
            self.check(layers=layer + 1)
        if step >= self.steps:
            self.check(steps=step + 1)
        if heads != self.heads or tokens != self.tokens:
            self.check(heads=heads, tokens=tokens)

    def save(self, path: str | Path, made_by: dict[str, Any] | None = None) -> None:
        """Write the table.

        Parameters
        ----------
        path : str or Path
            A JSON file.
        made_by : dict, optional
            What made it, such as predicted errors and times: JSON types.

        Raises
        ------
        ArtifactError
            For a file that cannot be written.
        """
        artifacts.write_json(arguments.path("path", path), KIND, VERSION, msgspec.to_builtins(self), made_by)

    @classmethod
    def load(cls, path: str | Path) -> "Budgets":
        """Read a table that `save` wrote.

        Parameters
        ----------
        path : str or Path
            A JSON file.

        Returns
        -------
        Budgets

        Raises
        ------
        ArtifactError
            For a file of another kind or version, or that is damaged.
        """
        document = artifacts.read_json(arguments.path("path", path), KIND, VERSION)
        body = {name: value for name, value in document.items() if name not in ("kind", "version", "made_by")}
        try:
            return msgspec.convert(body, cls)
        except (msgspec.ValidationError, PatternError) as error:
            raise ArtifactError(f"{path}: expected a {KIND} file, found another content: {error}") from None


def parts(steps: int, count: int) -> tuple[int, ...]:
    """First steps of so many parts of a run, as equal as can be. Raises `PatternError` for more parts than steps."""
    arguments.whole("parts", count, 1, steps, error=PatternError)
    return tuple(part * steps // count for part in range(count))
