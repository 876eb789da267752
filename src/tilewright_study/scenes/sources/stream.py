"""A stream: a camera pans and zooms over a large scene in which objects move; frames follow one another.

Of several shots each is of a scene of its own: what two networks see of one scene says little of either.
"""

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright_study.scenes import drawing, sources
from tilewright_study.scenes.sources import scenes

# ASSUME: objects of the large scene, its sides in frames, and how the camera and they move. Ways are in heights of a
# frame, times in frames: a wave of the camera takes a few seconds at 30 frames a second.
COUNT, SPREAD = 64, 3.0
PAN, ZOOM, PERIODS = 0.7, 0.35, (150.0, 500.0)
WANDER, WANDERS = 0.35, (60.0, 240.0)
# Photographs and objects of a stream are those of this split.
SPLIT = "test"


class Stream(scenes.Scenes):
    """See `tilewright_study.scenes.sources`: one split, ``test``, whose indices are the frames of the shots from
    `index` on, each as long as the others or a frame shorter."""

    splits = (SPLIT,)

    def __init__(self, frames=300, index=0, seed=0, shots=1):
        super().__init__(seed)
        if frames < 1 or index < 0:
            raise ConfigError(f"stream: expected at least a frame and an index of at least 0, found {frames}, {index}")
        if not 1 <= shots <= frames:
            raise ConfigError(f"stream: expected shots, each of at least one of {frames} frames, found {shots}")
        self.frames, self.index, self.shots = frames, index, shots

    def count(self, split):
        """How many frames there are."""
        super().count(split)
        return self.frames

    def drawn(self, split, indices, size, device="cpu"):
        """Pictures uint8 [B, 3, H, W] and labels of frames."""
        indices, pixels = sources.checked(self, split, indices), sources.pixels(size)
        at = np.array(indices)
        shots = at * self.shots // self.frames
        times = (at + -shots * self.frames // self.shots).astype(np.float64)[:, None]
        # A scene of its own for each shot: those of `scenes` have no such indices.
        first = scenes.COUNTS[SPLIT] + self.index
        every = drawing.numbers(SPLIT, (first + shots).tolist(), seed=self.seed, count=COUNT)
        # Noise is anew in each frame, all else of a shot the same.
        every = every._replace(keys=every.keys + at * 7919 & 0x7FFFFFFF)
        things = drawing.things(SPLIT, every, pixels, counts=(COUNT, COUNT), spread=SPREAD)
        u = every.objects
        ways = [WANDER * _wave(times, u[..., 19 + axis], u[..., 21 + axis], WANDERS) for axis in range(2)]
        things = things._replace(x=things.x + ways[0], y=things.y + ways[1])
        v = u[:, 0, :]
        view = np.concatenate(
            [
                *(PAN * _wave(times, v[:, 19 + axis, None], v[:, 21 + axis, None], PERIODS) for axis in range(2)),
                np.exp(ZOOM * _wave(times, v[:, 23, None], v[:, 18, None], PERIODS)),
            ],
            1,
        )
        listed = drawing.listed(SPLIT, every, things, pixels, view=view)
        return drawing.drawn(listed, pixels, device)


def _wave(times, phase, period, periods):
    """A wave in -1..1 over time, of a phase and a period that are drawn, both in 0..1."""
    return np.sin(2 * np.pi * (phase + times / (periods[0] + (periods[1] - periods[0]) * period)))


def create(frames=300, index=0, seed=0, shots=1):
    """A stream of so many frames in so many shots, of which the first one has this index. Raises `ConfigError`."""
    return Stream(frames, index, seed, shots)
