"""Modules for models that are not of this package: attention over ready patterns.

`SparseAttention` stands where a vision transformer has timm's ``Attention``; `patterns` are the names that it takes.
"""

from tilewright.nn.attention import SparseAttention

__all__ = ["SparseAttention"]
