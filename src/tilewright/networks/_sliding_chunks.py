"""Vision Longformer's windows on a grid of tokens: their pattern, their bias, and attention by sliding chunks.

Zhang et al., "Multi-Scale Vision Longformer", ICCV 2021 (arXiv 2103.15358), section 3.2: queries are cut into chunks of
f x f tokens, and each chunk attends to the globals and to the 3 x 3 chunks around it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tilewright.masks import vision_longformer

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Scores that are held at a time, of some rows of chunks.
SCORES = 1 << 25


def by_offset(table: torch.Tensor, keys: tuple[int, int]) -> torch.Tensor:
    """A view [H, p, q, m, n] of a bias by offsets, table [H, K, L]: of queries and keys on two grids; keys: (m, n).

    Entry [h, y, x, b, a] is ``table[h, m - 1 + y - b, n - 1 + x - a]``; p = K - m + 1 and q = L - n + 1.
    """
    rows, columns = keys
    windows = table.flip(1, 2).unfold(1, rows, 1).unfold(2, columns, 1)
    return windows.flip(1, 2)


@dataclass(frozen=True)
class Windows:
    """Tokens of a sparse stage, `n_global` ones and a grid of ``(rows, columns)``, and the window of each.

    radius: the published f, side of a chunk. mode: ``chunk``, ``exact`` or ``cyclic``, see `masks.vision_longformer`.
    """

    grid: tuple[int, int]
    n_global: int
    radius: int
    mode: str

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks down and across."""
        rows, columns = self.grid
        return -(-rows // self.radius), -(-columns // self.radius)

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns of zeros that are tokens of the stage: in cyclic mode, the first chunks attend to them."""
        rows, columns = self.grid
        return (-rows % self.radius, -columns % self.radius) if self.mode == "cyclic" else (0, 0)

    @property
    def padded(self) -> bool:
        """Whether there is any padding."""
        below, right = self.padding
        return below > 0 or right > 0

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the grid, padding included."""
        (rows, columns), (below, right) = self.grid, self.padding
        return rows + below, columns + right

    @property
    def table_side(self) -> int:
        """Offsets along an axis of the bias table: from ``1 - 2f`` to ``2f - 1``."""
        return 4 * self.radius - 1

    def graph(self) -> "Graph":
        """The pattern, in the model's own order."""
        return vision_longformer.pattern(self.grid, self.n_global, self.radius, self.mode, padding=self.padding)

    def bias_index(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        """Slots of (query, key) pairs in a head's bias, as `masks.vision_longformer.bias_index_at` lays it out."""
        chunk = self.radius if self.mode == "cyclic" else None
        return vision_longformer.bias_index_at(
            torch.where, self.whole, self.n_global, 2 * self.radius, chunk, rows, cols
        )

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens x [B, N, C] of the globals and the grid, with the padding's zeros as further tokens."""
        return self._resized(x, self.grid, self.padding) if self.padded else x

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `pad`."""
        below, right = self.padding
        return self._resized(x, self.whole, (-below, -right)) if self.padded else x

    def real(self, like: torch.Tensor) -> torch.Tensor:
        """Ones [1, N, 1] where `pad` has put tokens, zeros where it has padded."""
        rows, columns = self.grid
        return self.pad(like.new_ones(1, self.n_global + rows * columns, 1))

    def _resized(self, x, grid, more):
        below, right = more
        tokens = x[:, self.n_global :].unflatten(1, grid)
        return torch.cat([x[:, : self.n_global], F.pad(tokens, (0, 0, 0, right, 0, below)).flatten(1, 2)], 1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The published formulation: q, k, v [B, H, N, D] in the model's own order, bias [H, n] or None.

        Globals attend to all tokens; the keys of each chunk's neighbourhood are copied next to one another, behind the
        globals, and a batch of matrix products runs over the chunks.
        """
        q = q * q.shape[-1] ** -0.5
        of_locals = self._of_locals(q, k, v, bias)
        return torch.cat([self._of_globals(q, k, v, bias), of_locals], 2) if self.n_global else of_locals

    def _of_globals(self, q, k, v, bias):
        g, size = self.n_global, self.table_side**2
        scores = q[:, :, :g] @ k.transpose(-2, -1)
        if bias is not None:
            scores[..., :g] += bias[:, size + 2 * g : -1].unflatten(1, (g, g))
            scores[..., g:] += bias[:, size + g : size + 2 * g, None]
        if self.padded:
            scores.masked_fill_(self.real(scores).flatten() == 0, -torch.inf)
        return scores.softmax(-1) @ v

    def _of_locals(self, q, k, v, bias):
        f, (down, across), g = self.radius, self.chunks, self.n_global
        (height, width), (batch, heads, _, dim) = self.whole, q.shape
        rest = below, right = down * f - height, across * f - width
        q = F.pad(self._by_rows(q), (0, 0, 0, right, 0, below))
        q = q.view(batch, heads, down, f, across, f, dim).transpose(4, 3)
        near = [(x[:, :, None, None, :g], self._neighbourhoods(x, rest)) for x in (k, v)]
        bias, outside = self._bias(bias, q), ~self._inside(q.device)
        step = max(1, SCORES // (batch * heads * across * f * f * (g + 9 * f * f)))
        parts = []
        for lo in range(0, down, step):
            rows = slice(lo, min(lo + step, down))
            keys, values = (
                torch.cat([own.expand(-1, -1, rows.stop - lo, across, -1, -1), others[:, :, rows].flatten(4, 5)], 4)
                for own, others in near
            )
            scores = q[:, :, rows].flatten(4, 5) @ keys.transpose(-2, -1)
            if bias is not None:
                scores += bias
            scores[..., g:].masked_fill_(outside[rows, :, None], -torch.inf)
            parts.append(scores.softmax(-1) @ values)
        out = torch.cat(parts, 2).unflatten(4, (f, f)).transpose(3, 4).reshape(batch, heads, down * f, across * f, dim)
        return out[:, :, :height, :width].flatten(2, 3)

    def _by_rows(self, x):
        return x[:, :, self.n_global :].unflatten(2, self.whole)

    def _neighbourhoods(self, x, rest):
        """A view [B, H, m, n, 3f, 3f, D] of the tokens around each chunk; rest: rows and columns to whole chunks."""
        f, (below, right) = self.radius, rest
        how = ("circular",) if self.mode == "cyclic" else ()
        x = F.pad(self._by_rows(x), (0, 0, f, f + right, f, f + below), *how)
        return x.unfold(2, 3 * f, f).unfold(3, 3 * f, f).movedim(4, -1)

    def _inside(self, device):
        """Bool [m, n, 9 f^2]: keys of each chunk's neighbourhood that it may see."""
        down, across = (self._seen(side, m, device) for side, m in zip(self.grid, self.chunks, strict=True))
        return (down[:, None, :, None] & across[None, :, None, :]).flatten(2)

    def _seen(self, side, m, device):
        """Bool [m, 3f]: coordinates around each of m chunks that it may see, along one axis of `side` tokens."""
        f = self.radius
        at = torch.arange(-f, 2 * f, device=device) + f * torch.arange(m, device=device)[:, None]
        seen = at < side
        # Around the edge lie whole chunks, with the zeros that they were padded with.
        return seen | (at >= m * f) if self.mode == "cyclic" else seen & (at >= 0)

    def _bias(self, bias, like):
        """Additive [H or 1, 1, 1, f^2, g + 9 f^2] for each query of a chunk and key of its neighbourhood, or None."""
        f, g, size = self.radius, self.n_global, self.table_side**2
        if bias is None and self.mode != "exact":
            return None
        if bias is None:
            full = like.new_zeros(1, f * f, g + 9 * f * f)
        else:
            table = bias[:, :size].unflatten(1, (self.table_side, self.table_side))
            local = by_offset(table, (3 * f, 3 * f)).flatten(1, 2).flatten(2)
            full = torch.cat([bias[:, None, size : size + g].expand(-1, f * f, -1), local], 2)
        if self.mode == "exact":
            at = torch.arange(3 * f, device=like.device)
            far = (f + at[:f, None] - at).abs() > f
            far = (far[:, None, :, None] | far[None, :, None, :]).flatten(0, 1).flatten(1)
            full[..., g:].masked_fill_(far, -torch.inf)
        return full[:, None, None]
