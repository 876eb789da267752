"""Frames of a clip as it is drawn, and of clips that a trained network samples with dense attention and with lists.

Frames of clips that the trained network samples from the same noise, with dense attention and with lists, below a clip
as it is drawn.
"""

from tilewright import devices
from tilewright_study.figures import _style
from tilewright_study.stages import video_pictures


def needs(config):
    """Pictures of each network with weights, on a GPU: a network that a CPU trained draws noise."""
    return video_pictures.needs(config) if devices.facts(config.device).GPU_TIMER else []


def draw(inputs):
    """A block for each network, a row for each clip."""
    found = [video_pictures.read(path) for path in inputs]
    heights = [max(1, len(header.get("clips", ()))) for _, header in found]
    drawn = _style.figure(9.6, 1.2 + 1.05 * sum(heights))
    parts = drawn.subfigures(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (arrays, header) in zip(parts, found, strict=True):
        clips = [arrays[f"clips.{at}"] for at in range(len(header.get("clips", ())))]
        if not clips:
            axes = part.subplots()
            _style.nothing(axes, header["reason"])
            continue
        panels = part.subplots(len(clips), len(clips[0]), squeeze=False)
        for row, name, frames in zip(panels, header["clips"], clips, strict=True):
            for axes, frame in zip(row, frames, strict=True):
                axes.imshow(frame)
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                axes.spines[:].set_visible(False)
            row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8.5)
        part.suptitle(f"{header['network']}, trained for {header['weights']}", fontsize=9.5)
    _style.head(drawn, "Clips from the same noise, by attention")
    steps = ", ".join(sorted({str(header["sampler"]) for _, header in found if "sampler" in header})) or "no"
    devices = ", ".join(dict.fromkeys(header["device"] for _, header in found))
    _style.notes(
        drawn,
        [
            f'{devices}; {steps} steps of the sampler. "As drawn" is a clip of photographs that the network has not '
            "seen, for comparison: it is not what the network was asked for. All others begin with the same noise.",
        ],
    )
    return drawn
