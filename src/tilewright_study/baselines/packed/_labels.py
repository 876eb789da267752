"""What figures call these baselines, and the colours of their lines. No job that measures imports this module."""

LABELS = {
    "sdpa_mask": "padded, masked SDPA",
    "sdpa_flash": "padded, flash without mask (a bound)",
    "flash_varlen": "FlashAttention varlen",
    "flash3_varlen": "FlashAttention-3 varlen",
    "torch_varlen": "torch varlen",
    "nested": "NestedTensor",
    "flex": "FlexAttention",
}
COLOURS = {
    **{"sdpa_mask": "#5A5A5A", "sdpa_flash": "#E69F00", "flash_varlen": "#D55E00", "flash3_varlen": "#882255"},
    **{"torch_varlen": "#009E73", "nested": "#CC79A7", "flex": "#56B4E9"},
}
