"""Programs for push memories. A name states the side of the image: ``gaussian-64``.

Contract of a member module:
    ``outputs(size) -> tuple of Stage``: the program for an image whose side is `size`; raises `ProgramError` for a side
        that it cannot take.
    ``SIZE``: the side that tables show.
"""

import re
from collections.abc import Sequence

from tilewright.core import registry
from tilewright.core.errors import UnknownNameError
from tilewright.pushmem.dsl import Source

NAMES = (
    *("brighten_blur", "gaussian", "cascade", "harris", "unsharp", "camera", "upsample", "downsample", "pyramid"),
    *("resnet", "mobilenet", "patch_embed", "transpose", "channels", "layers", "mixer"),
)


def program(name: str) -> Sequence[Source]:
    """The outputs of the app `name`, e.g. ``harris-64``. Raises `UnknownNameError` and `ProgramError`."""
    member, side = parse(name)
    return registry.member("tilewright.pushmem.apps", "app", member, NAMES).outputs(side)


def parse(name: str) -> tuple[str, int]:
    """The app and the side of its image, ``("harris", 64)``. Raises `UnknownNameError`."""
    match = re.fullmatch(r"([a-z_]+)-(\d{1,9})", name)
    if not match or match[1] not in NAMES:
        raise UnknownNameError("app", name, [f"{n}-<side>" for n in NAMES])
    return match[1], int(match[2])
