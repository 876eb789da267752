"""What figures call the ways to batch, and the colours of their lines. No job that measures imports this module."""

LABELS = {
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
