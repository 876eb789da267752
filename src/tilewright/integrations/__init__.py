"""Tilewright's attention in modules of other packages.

`sdpa`: in any module that calls `scaled_dot_product_attention`. `diffusers`: by name, through its dispatcher. Importing
this package imports neither torch nor theirs.
"""
