"""Oracles of networks beside `tilewright.reference`: logits."""

from torch import Tensor

from tilewright.reference import relative_error


def logits_error(found: Tensor, expected: Tensor) -> float:
    """`relative_error` of an image's logits [B, classes], by how far those expected spread around their mean."""
    return relative_error(found, expected, expected.double().mean(1, keepdim=True))
