"""What figures call the ways in which networks attend and batch, and the colours of lines. No job that measures
imports this module."""

ATTENTIONS = {
    **{"dense": "masked SDPA", "tilewright": "Tilewright", "flex": "FlexAttention", "native": "as published"},
    **{"full": "dense SDPA, without the mask"},
}
BATCHINGS = {
    "padded": "padded to the full length",
    "padded_unfused": "the same, attention unfused (as published)",
    "padded_kept": "padded to the longest kept",
    "gathered": "gathered, dense",
    "ragged": "Tilewright, packed",
    "varlen": "packed, FlashAttention varlen",
}
COLOURS = {
    **{"padded": "#5A5A5A", "padded_unfused": "#AAAAAA", "padded_kept": "#E69F00", "gathered": "#009E73"},
    **{"ragged": "#0072B2", "varlen": "#D55E00"},
}
