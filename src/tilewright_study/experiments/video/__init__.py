"""One pass of a video network by kind of attention: time, what of it is attention and choosing, FLOPs (stage T5)."""

import math
from typing import Literal

from tilewright import devices, networks
from tilewright.attention import backends
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import video_attentions
from tilewright_study import sections
from tilewright_study.experiments.slices import ORDERS
from tilewright_study.measure import rows
from tilewright_study.measure import weights as _weights
from tilewright_study.measure.rows import Count, Number

TABLES = ("video",)
FIGURES = ("video_step", "video_maps")

MODES = ("eager", "compile")
# Attentions that choose keys, and keep their lists from pass to pass where `every` is above 1.
CHOOSING = {"slices": "pooled", "blocks": "blocks"}


class Attention(sections.Section, frozen=True):
    """An attention that is timed.

    by: of tilewright.networks.video_attentions
    settings: its own, without steps
    order: of the tokens; null is that of the attention, or raster
    every: lists are made in each so many-th pass
    """

    by: str
    settings: dict
    order: str | None
    every: int


class Values(sections.Section, frozen=True):
    """What all networks are run with.

    attention: what is timed, by a name of one's own, the dense one first
    modes: eager, or layers compiled by torch.compile; on a GPU passes are captured in CUDA graphs in both
    sampler: steps in which a network that was trained here makes a clip, to be compared with that of dense attention
    max_seconds: a timing stops after this time, in seconds
    """

    attention: dict[str, Attention]
    modes: tuple[str, ...]
    sampler: int
    max_seconds: float


class Section(Values, frozen=True):
    """One pass of video networks.

    weights: of networks, by a name of one's own
    networks: names of video networks, whose weights are random, or of weights
    """

    weights: dict[str, _weights.Weights]
    networks: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        _weights.check("video.weights", self.weights)
        sections.distinct("video.networks", self.networks)
        for name in self.networks:
            if name not in self.weights:
                sections.at("video.networks", networks.parse_video, name)
        check_attention("video.attention", self.attention)
        sections.selection("video.modes", self.modes)
        sections.known("video.modes", "mode", self.modes, MODES)
        sections.at_least("video.sampler", 1, [self.sampler])
        sections.above_zero("video.max_seconds", self.max_seconds)


class Settings(Values, frozen=True):
    """What one network is run with. weights: None for random ones."""

    weights: _weights.Weights | None


class Row(rows.Timed, frozen=True, kw_only=True):
    """A pass of a network with one attention: latents, a time and a prompt to the velocity.

    weights: ``random``, the steps of a training, or an official file. attention: its name in the configuration; by: of
    which kind it is; every: lists are made in each so many-th pass. density, recall: of the lists, the share of keys
    and of attention that they keep, mean over layers, heads and queries. flops_share: of the products of a pass, over
    those with dense attention, without choosing. relative_error, tolerance: of the worst of all layers, against
    float64 over its lists. whole_error, whole_tolerance: of the velocity with lists of all keys, against dense
    attention. velocity_error: of the velocity as timed, against dense attention; not a check. p50_us: a pass, the mean
    of `every` passes; made_us, kept_us: one that makes lists, and one that has them. attend_us, predict_us: of it, the
    attention and the choosing of all layers, timed by themselves; rest_us: the remainder. peak_bytes: most of a GPU's
    memory that a pass takes, beside weights and kept lists; lists_bytes: of these. psnr: of a sampled clip, in dB over
    that of dense attention from the same noise; sample_s: how long that took.
    """

    kind: Literal["video"] = "video"
    version: Literal[1] = 1
    network: str = ""
    weights: str = ""
    layers: Count = None
    heads: Count = None
    grid: str = ""
    tokens: Count = None
    attention: str = ""
    by: str = ""
    token_order: str = ""
    every: Count = None
    mode: str = ""
    parameters: Count = None
    density: Number = None
    recall: Number = None
    flops_share: Number = None
    checked_rows: Count = None
    whole_error: Number = None
    whole_tolerance: Number = None
    velocity_error: Number = None
    first_call_s: Number = None
    made_us: Number = None
    kept_us: Number = None
    timing: str = ""
    attend_us: Number = None
    predict_us: Number = None
    rest_us: Number = None
    peak_bytes: Count = None
    lists_bytes: Count = None
    sampler_steps: Count = None
    psnr: Number = None
    sample_s: Number = None


NAMED = "{network} {attention}, {mode}"


def check_attention(place, found):
    """Raise `ConfigError` for attentions that are unknown, or of which the first is not dense."""
    first = next(iter(found.values()), None)
    if first is None or first.by != "dense":
        raise ConfigError(f"{place}: expected one by dense first, found {'none' if first is None else first.by}")
    for name, chosen in found.items():
        sections.known(f"{place}.{name}", "attention", (chosen.by,), video_attentions.NAMES)
        sections.known(f"{place}.{name}", "order of tokens", filter(None, (chosen.order,)), ORDERS)
        sections.at_least(f"{place}.{name}.every", 1, [chosen.every])
        if chosen.every > 1 and chosen.by not in CHOOSING:
            raise ConfigError(f"{place}.{name}.every: expected 1 for attention {chosen.by}, which makes no lists")
        if "steps" in chosen.settings:
            raise ConfigError(f"{place}.{name}.settings: expected every instead of steps")


def cases(config):
    """The networks, and the weights."""
    return config.video.networks


def settings(config, case):
    """`Settings` of one network."""
    section = config.video
    weights = section.weights[case].at(case) if case in section.weights else None
    return sections.taken(Settings, section, weights=weights)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    name = case if settings.weights is None else settings.weights.network
    return [{"network": name, "by": by} for by in {"dense", *(chosen.by for chosen in settings.attention.values())}]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    family, _ = networks.parse_video(row["network"])
    own = ["tilewright_study.measure.weights"]
    entered = [f"tilewright.networks.{family}", "tilewright_study.scenes.clips", "tilewright_study.training.video"]
    entered += [f"{video_attentions.__name__}.{name}" for name in {"dense", row.get("by") or "dense"}]
    if row.get("by") in CHOOSING:
        entered += devices.modules(device, "slices.executor", "slices.selection")
    if row.get("by") == "window":
        entered += ["tilewright.networks.attentions.tilewright", *devices.modules(device, *backends.PLANNING)]
    return own + entered


def named(settings, device):
    """The modules of the predictors."""
    chosen = [each for each in settings.attention.values() if each.by in CHOOSING]
    return [f"tilewright.slices.predictors.{each.settings.get('by', CHOOSING[each.by])}" for each in chosen]


def sources(settings):
    """The user's own weights, or those that a rule trains."""
    return [] if settings.weights is None else _weights.sources(settings.weights)


def size(case, settings):
    """Numbers that a case holds: weights, and a layer's tokens some twenty times."""
    weights = settings.weights
    name, options = (case, {}) if weights is None else (weights.network, weights.options)
    _, stated = networks.parse_video(name, options)
    width, hidden, _, layers = pattern.VARIANTS[stated["variant"]]
    height, columns = pattern.RESOLUTIONS[stated["resolution"]]
    latents = pattern.latent_shape(stated["frames"], stated.get("height", height), stated.get("width", columns))
    return layers * width * (8 * width + 2 * hidden) + 20 * width * math.prod(pattern.grid(latents))


def remark(row):
    """What the log says of a row that passed."""
    kept = "" if row.get("density") is None else f", {row['density']:.1%} of the keys"
    return f"{row['p50_us'] / 1e3:,.1f} ms a pass{kept}, {row['attend_us'] / row['p50_us']:.0%} of it attention"
