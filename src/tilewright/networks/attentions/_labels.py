"""What figures call the kinds of attention. No job that measures imports this module."""

LABELS = {
    **{"dense": "masked SDPA", "tilewright": "Tilewright", "flex": "FlexAttention", "native": "as published"},
    **{"full": "dense SDPA, without the mask"},
}
