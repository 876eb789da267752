"""What `tilewright calibrate` measures, and the searches of forms that come first where they are asked for."""

from tilewright import targets


def calibrated(device, tiles, head_dim, dtype, anew=False, choose=False):
    """``{tile name: (Calibration, …)}`` of a kind of device, see `targets`.

    choose: of the fastest forms, which are found first, with those of attention to slices and of their prediction.
    """
    known = targets.calibration(device)
    if choose:
        from tilewright.targets.cuda import form_search, slice_form_search, slice_prediction_search

        form_search.search(tiles, head_dim, dtype, anew)
        slice_form_search.search(head_dim, dtype, anew)
        slice_prediction_search.search(head_dim, dtype, anew)
    return known.of(tiles, head_dim, dtype, anew)
