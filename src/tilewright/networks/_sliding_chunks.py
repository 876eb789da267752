"""Vision Longformer's windows on a grid of tokens: their pattern, their bias, and attention by sliding chunks.

Zhang et al., "Multi-Scale Vision Longformer", ICCV 2021 (arXiv 2103.15358), section 3.2: queries are cut into chunks of
f x f tokens, and each chunk attends to the globals and to the 3 x 3 chunks around it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilewright.models import vision_longformer

# Scores that are held at a time, of some rows of chunks.
SCORES = 1 << 25


def by_offset(table, keys):
    """A view [H, q, q, keys, keys] of a bias by offsets, table [H, L, L]: of queries and keys on two square grids.

    Entry [h, y, x, b, a] is ``table[h, keys - 1 + y - b, keys - 1 + x - a]``; q = L - keys + 1.
    """
    windows = table.flip(1, 2).unfold(1, keys, 1).unfold(2, keys, 1)
    return windows.flip(1, 2)


@dataclass(frozen=True)
class Windows:
    """Tokens of a sparse stage, `n_global` ones and a grid of `side` x `side`, and the window of each.

    radius: the published f, side of a chunk. mode: ``chunk``, ``exact`` or ``cyclic``, see `models.vision_longformer`.
    """

    side: int
    n_global: int
    radius: int
    mode: str

    @property
    def chunks(self):
        """Chunks along a side."""
        return -(-self.side // self.radius)

    @property
    def padding(self):
        """Rows and columns of zeros that are tokens of the stage: in cyclic mode, the first chunks attend to them."""
        return self.chunks * self.radius - self.side if self.mode == "cyclic" else 0

    @property
    def width(self):
        """Tokens along a side of the grid, padding included."""
        return self.side + self.padding

    @property
    def table_side(self):
        """Offsets along an axis of the bias table: from ``1 - 2f`` to ``2f - 1``."""
        return 4 * self.radius - 1

    def graph(self):
        """The pattern, in the model's own order."""
        return vision_longformer.pattern(self.side, self.n_global, self.radius, self.mode, padding=self.padding)

    def bias_index(self, rows, cols):
        """Slots of (query, key) pairs in a head's bias, as `models.vision_longformer.bias_index` lays it out."""
        chunk = self.radius if self.mode == "cyclic" else None
        return vision_longformer.bias_index_at(
            torch.where, self.width, self.n_global, 2 * self.radius, chunk, rows, cols
        )

    def pad(self, x):
        """Tokens x [B, N, C] of the globals and the grid, with the padding's zeros as further tokens."""
        return x if not self.padding else self._resized(x, self.side, self.padding)

    def unpad(self, x):
        """Undo `pad`."""
        return x if not self.padding else self._resized(x, self.width, -self.padding)

    def real(self, like):
        """Ones [1, N, 1] where `pad` has put tokens, zeros where it has padded."""
        return self.pad(like.new_ones(1, self.n_global + self.side**2, 1))

    def _resized(self, x, side, more):
        grid = x[:, self.n_global :].unflatten(1, (side, side))
        return torch.cat([x[:, : self.n_global], F.pad(grid, (0, 0, 0, more, 0, more)).flatten(1, 2)], 1)

    def attend(self, q, k, v, bias):
        """The published formulation: q, k, v [B, H, N, D] in the model's own order, bias [H, n] or None.

        Globals attend to all tokens; the keys of each chunk's neighbourhood are copied next to one another, behind the
        globals, and a batch of matrix products runs over the chunks.
        """
        q = q * q.shape[-1] ** -0.5
        of_locals = self._of_locals(q, k, v, bias)
        return torch.cat([self._of_globals(q, k, v, bias), of_locals], 2) if self.n_global else of_locals

    def _of_globals(self, q, k, v, bias):
        g, size = self.n_global, self.table_side**2
        scores = q[:, :, :g] @ k.mT
        if bias is not None:
            scores[..., :g] += bias[:, size + 2 * g : -1].unflatten(1, (g, g))
            scores[..., g:] += bias[:, size + g : size + 2 * g, None]
        if self.padding:
            scores.masked_fill_(self.real(scores).flatten() == 0, -torch.inf)
        return scores.softmax(-1) @ v

    def _of_locals(self, q, k, v, bias):
        f, m, g = self.radius, self.chunks, self.n_global
        batch, heads, _, dim = q.shape
        rest = m * f - self.width
        q = F.pad(self._grid(q), (0, 0, 0, rest, 0, rest)).view(batch, heads, m, f, m, f, dim).transpose(4, 3)
        near = [(x[:, :, None, None, :g], self._neighbourhoods(x, rest)) for x in (k, v)]
        bias, outside = self._bias(bias, q), ~self._inside(q.device)
        step = max(1, SCORES // (batch * heads * m * f * f * (g + 9 * f * f)))
        parts = []
        for lo in range(0, m, step):
            rows = slice(lo, min(lo + step, m))
            keys, values = (
                torch.cat([own.expand(-1, -1, rows.stop - lo, m, -1, -1), others[:, :, rows].flatten(4, 5)], 4)
                for own, others in near
            )
            scores = q[:, :, rows].flatten(4, 5) @ keys.mT
            if bias is not None:
                scores += bias
            scores[..., g:].masked_fill_(outside[rows, :, None], -torch.inf)
            parts.append(scores.softmax(-1) @ values)
        out = torch.cat(parts, 2).unflatten(4, (f, f)).transpose(3, 4).reshape(batch, heads, m * f, m * f, dim)
        return out[:, :, : self.width, : self.width].flatten(2, 3)

    def _grid(self, x):
        return x[:, :, self.n_global :].unflatten(2, (self.width, self.width))

    def _neighbourhoods(self, x, rest):
        """A view [B, H, m, m, 3f, 3f, D] of the tokens around each chunk."""
        f = self.radius
        how = ("circular",) if self.mode == "cyclic" else ()
        x = F.pad(self._grid(x), (0, 0, f, f + rest, f, f + rest), *how)
        return x.unfold(2, 3 * f, f).unfold(3, 3 * f, f).movedim(4, -1)

    def _inside(self, device):
        """Bool [m, m, 9 f^2]: keys of each chunk's neighbourhood that it may see."""
        f, m = self.radius, self.chunks
        at = torch.arange(-f, 2 * f, device=device) + f * torch.arange(m, device=device)[:, None]
        seen = at < self.side
        # Around the edge lie whole chunks, with the zeros that they were padded with.
        seen = seen | (at >= m * f) if self.mode == "cyclic" else seen & (at >= 0)
        return (seen[:, None, :, None] & seen[None, :, None, :]).flatten(2)

    def _bias(self, bias, like):
        """Additive [H or 1, 1, 1, f^2, g + 9 f^2] for each query of a chunk and key of its neighbourhood, or None."""
        f, g, size = self.radius, self.n_global, self.table_side**2
        if bias is None and self.mode != "exact":
            return None
        if bias is None:
            full = like.new_zeros(1, f * f, g + 9 * f * f)
        else:
            table = bias[:, :size].unflatten(1, (self.table_side, self.table_side))
            local = by_offset(table, 3 * f).flatten(1, 2).flatten(2)
            full = torch.cat([bias[:, None, size : size + g].expand(-1, f * f, -1), local], 2)
        if self.mode == "exact":
            at = torch.arange(3 * f, device=like.device)
            far = (f + at[:f, None] - at).abs() > f
            far = (far[:, None, :, None] | far[None, :, None, :]).flatten(0, 1).flatten(1)
            full[..., g:].masked_fill_(far, -torch.inf)
        return full[:, None, None]
