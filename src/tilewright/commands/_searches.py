"""What `tilewright calibrate` measures, and the searches of forms that come first where they are asked for."""

from typing import TYPE_CHECKING

from tilewright.attention import backends

if TYPE_CHECKING:
    import torch


def calibrated(device, tiles, head_dim: int, dtype: "torch.dtype", anew: bool = False, choose=False):
    """``{tile name: (Calibration, …)}`` of a kind of device, see `attention.backends`.

    choose: of the fastest forms, which are found first.
    """
    known = backends.calibration(device)
    if choose:
        from tilewright.attention.cuda.cost import form_search

        form_search.search(tiles, head_dim, dtype, anew)
    return known.of(tiles, head_dim, dtype, anew)
