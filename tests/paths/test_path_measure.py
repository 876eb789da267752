"""What is measured of paths on scenes: how many images at once."""

import pytest

from tilewright.models import segformer
from tilewright.paths import measure


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("pixels", [(64, 64), (512, 512), (360, 480), (1024, 1024), (8192, 8192)])
def test_maps_of_the_images_at_once_are_few_enough_to_interpolate(pixels, gpu):
    count = measure.at_once(pixels, gpu)
    channels = max(variant.channels for variant in segformer.VARIANTS.values())
    assert 1 <= count <= measure.BATCH[gpu]
    values = channels * -(-pixels[0] // 4) * -(-pixels[1] // 4)
    assert count * values < 2**31 or count == 1
    # No fewer than are known to fit.
    assert count == measure.BATCH[gpu] or (count + 1) * pixels[0] * pixels[1] > measure.MOST_PIXELS
