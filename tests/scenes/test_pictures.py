"""Gray photographs."""

import numpy as np
import pytest
from PIL import Image

from tilewright.core import images
from tilewright.core.errors import UnknownNameError
from tilewright_study.scenes import pictures


@pytest.mark.parametrize("name", pictures.GRAY)
def test_gray_photographs_have_equal_channels(name):
    with Image.open(images.carried(pictures.GRAY[name])) as image:
        assert image.size == pictures.GRAY[name].size
    pixels = pictures.gray(name, (40, 60))
    assert pixels.shape == (3, 40, 60) and pixels.dtype == np.float32 and 0.1 < np.ptp(pixels) <= 1
    assert (pixels == pixels[:1]).all() and pixels.flags.writeable
    with pytest.raises(UnknownNameError, match="unknown gray photograph 'coffee'; known: brick, camera, grass, gravel"):
        pictures.gray("coffee", 16)
