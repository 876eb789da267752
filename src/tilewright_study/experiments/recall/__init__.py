"""How many keys lists have to keep for a share of attention, by shape of groups, order of tokens and chooser, and times
where all keep the same share (stage T5)."""

from typing import Literal

from tilewright import networks
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright_study import sections
from tilewright_study.experiments import slices
from tilewright_study.experiments.slices import ORDERS, sizes
from tilewright_study.measure import weights as _weights
from tilewright_study.measure.rows import Number

TABLES = ("recall",)
FIGURES = ("slices_recall",)


class Values(slices.Lists, frozen=True):
    """What all cases have in common.

    layers: of a network, evenly spread, whose heads are taken together
    noise: its shares in the clips that such a network is given
    orders: orders of the tokens; predictors choose, and times are taken, in the first one
    recalls: shares of attention that lists are to keep, on average over queries
    timed: that at which times are taken
    """

    layers: int
    noise: tuple[float, ...]
    orders: tuple[str, ...]
    recalls: tuple[float, ...]
    timed: float


class Section(Values, frozen=True):
    """Keys that lists keep for a share of attention.

    shapes: pairs of heads and the dimension of a head, for planted maps
    grids: frames, rows and columns of a video's tokens, for planted maps
    joint: further cases of planted maps, with tokens of text, as in slices
    networks: grids for the maps of networks, by the name that their weights have in video.weights
    """

    shapes: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int, int], ...]
    joint: tuple[str, ...]
    networks: dict[str, tuple[tuple[int, int, int], ...]]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        slices.check_maps("recall", self)
        weights = {} if config.video is None else config.video.weights
        sections.known("recall.networks", "weights of video.weights", self.networks, weights)
        for name, grids in self.networks.items():
            sections.at_least(f"recall.networks.{name}", 1, [number for grid in grids for number in grid])
        sections.at_least("recall.layers", 1, [self.layers])
        sections.distinct("recall.noise", self.noise)
        for noise in self.noise:
            if not 0 < noise <= 1:
                raise ConfigError(f"recall.noise: expected shares above 0, at most 1, found {noise}")
        sections.selection("recall.orders", self.orders)
        sections.known("recall.orders", "order of tokens", self.orders, ORDERS)
        sections.selection("recall.recalls", self.recalls)
        for recall in self.recalls:
            if not 0 < recall < 1:
                raise ConfigError(f"recall.recalls: expected shares between 0 and 1, found {recall}")
        if self.timed not in self.recalls:
            raise ConfigError(f"recall.timed: expected one of {', '.join(map(str, self.recalls))}, found {self.timed}")


class Settings(Values, frozen=True):
    """What one case is run with. weights: of a network, or None for planted maps."""

    weights: _weights.Weights | None


class Row(slices.Shown, frozen=True, kw_only=True):
    """Lists that keep a share of attention, and attention by them.

    maps: ``planted``, or of a network, ``trained`` here or ``official``. network, weights, clip_noise: its name, what
    its weights are, and the share of noise in its clip; heads are then those of several layers. target: the share of
    attention that was asked for; recall: that which the lists keep. provider, call: blank where no time was taken.
    """

    kind: Literal["recall"] = "recall"
    version: Literal[2] = 2
    network: str = ""
    weights: str = ""
    clip_noise: Number = None
    target: Number = None


NAMED = "{maps} {clip_noise} {chosen_by} {group}, {token_order}, recall {target} {provider}"
compiles = slices.compiles


def cases(config):
    """Every shape on every grid, and every network on its grids."""
    section = config.recall
    named = [f"{name}-{'x'.join(map(str, grid))}" for name, grids in section.networks.items() for grid in grids]
    return slices.case_names(section) + named


def settings(config, case):
    """`Settings` of one case."""
    section, (name, _, _) = config.recall, case.rpartition("-")
    weights = config.video.weights[name].at(name) if name in section.networks else None
    return sections.taken(Settings, section, weights=weights)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    named = {} if settings.weights is None else {"network": settings.weights.network}
    return [row | named for row in slices.planned(case, settings)]


named = slices.named


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    own = ["tilewright_study.measure.weights", "tilewright_study.scenes.captured", "tilewright_study.training.video"]
    own += ["tilewright.networks.wan", "tilewright.networks.video_attentions.dense"]
    return slices.modules(row, device) + (own if row.get("network") else [])


def sources(settings):
    """The user's own weights, or those that a rule trains."""
    return [] if settings.weights is None else _weights.sources(settings.weights)


def shape(case, settings):
    """``(heads, head_dim, grid)`` of a case; the heads of a network are those of all layers that are taken."""
    if settings.weights is None:
        return sizes(case)
    _, options = networks.parse_video(settings.weights.network, settings.weights.options)
    size = pattern.VARIANTS[options["variant"]]
    layers = min(settings.layers, options.get("layers", size.layers))
    _, _, grid = sizes(f"{size.heads}x{pattern.HEAD_DIM}-{case.rpartition('-')[2]}")
    return layers * size.heads, pattern.HEAD_DIM, grid


def size(case, settings):
    """Numbers that a case holds, see `slices.size`."""
    heads, head_dim, grid = shape(case, settings)
    return 4 * slices.size("-".join("x".join(map(str, own)) for own in ((heads, head_dim), grid)), settings)


def remark(row):
    """What the log says of a row that passed."""
    kept = f"{row['density']:.1%} of the keys"
    return f"{row['p50_us']:,.1f} us, {kept}" if "p50_us" in row else kept
