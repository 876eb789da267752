"""Scenes: data made by rule, where no checkpoint and no video can be fetched, and readers of data that others made.

`planted`: queries and keys whose attention maps have a known structure and density, at any size. `clips`: short videos
of moving photographs, and their latents. `drawing`: objects over photographs, with a label for each pixel. Each is a
function of its arguments and seed alone. `sources`: images with labels by name, drawn or read; `create` makes one.
"""

from tilewright_study.scenes.sources import NAMES, create, named, stated

__all__ = ["NAMES", "create", "named", "stated"]
