"""Windows of one regional and w^2 local tokens: how they stand in a stage of RegionViT, and attention within them."""

import math
from functools import cached_property

import torch
import torch.nn.functional as F

from tilewright.core import sides
from tilewright.masks import regionvit as pattern
from tilewright.networks import attention_sites


class Windows:
    """The tokens of a stage, how they stand while in it, and the `Site` at which they attend.

    Tokens are those of `pattern.windows`, in the site's order. In the published form they are [1 regional, w^2 local]
    of each window, all of its padding among them.
    """

    def __init__(
        self, side: int | tuple[int, ...], regions: int | tuple[int, ...], window: int, heads: int, attention: str
    ):
        """side, regions: tokens along a side of the local and of the regional grid, or ``(rows, columns)`` of each."""
        self.grid, self.regions, self.window = sides.pair(side), sides.pair(regions), window
        self.copies: dict = {}
        self.n_regional = n_regional = math.prod(self.regions)
        # The one behind all tokens of the grids: padding.
        self.zero = n_regional + math.prod(self.grid)
        # By device: copied there once. A plain variable, since torch cannot compile the way to an attribute's copies.
        places = {torch.device("cpu"): torch.from_numpy(pattern.places(self.grid, self.regions, window))}

        def bias_index(rows, cols):
            if rows.device not in places:
                with torch.inference_mode(False):
                    places[rows.device] = places[torch.device("cpu")].to(rows.device)
            y, x = places[rows.device]
            q, k = ((tokens - n_regional).clamp(min=0) for tokens in (rows, cols))
            local = (rows >= n_regional) & (cols >= n_regional)
            return torch.where(local, pattern.offset_index(y[k] - y[q], x[k] - x[q], window), (2 * window - 1) ** 2)

        # A single window is full attention, which is the same in every mode.
        self.site = attention_sites.Site(
            attention if n_regional > 1 else "native",
            lambda: pattern.windows(side, regions, window),
            heads,
            pattern.HEAD_DIM,
            self.native,
            bias_index,
            native_layout=True,
        )

    def enter(self, regionals: torch.Tensor, locals_: torch.Tensor) -> torch.Tensor:
        """Grids [B, C, r, s] and [B, C, n, m] to tokens [B, N, C]; padding is zero."""
        grids = [grid.flatten(2).transpose(1, 2) for grid in (regionals, locals_)]
        x = torch.cat((*grids, torch.zeros_like(grids[0][:, :1])), 1)
        return x.index_select(1, attention_sites.resident(self, "_tokens", x.device))

    def leave(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Undo `enter`; padding is dropped."""
        x = x.index_select(1, attention_sites.resident(self, "_back", x.device)).transpose(1, 2)
        regionals, locals_ = x.split((self.n_regional, self.zero - self.n_regional), 2)
        return regionals.unflatten(2, self.regions), locals_.unflatten(2, self.grid)

    def regionals(self, device: torch.device | str) -> torch.Tensor:
        """Where the regional tokens stand, a tensor on `device`."""
        return attention_sites.resident(self, "_back", device)[: self.n_regional]

    @cached_property
    def _tokens(self):
        """Which token of the two grids, one after the other, each token is."""
        if self.site.attention == "native":
            (rows, columns), w, (height, width) = self.regions, self.window, self.grid
            y, x = torch.arange(rows * w, device="cpu")[:, None], torch.arange(columns * w, device="cpu")
            grid = torch.where((y < height) & (x < width), self.n_regional + width * y + x, self.zero)
            grid = grid.view(rows, w, columns, w).transpose(1, 2).reshape(-1, w * w)
            return torch.cat((torch.arange(self.n_regional, device="cpu")[:, None], grid), 1).flatten()
        tokens = torch.arange(self.site.graph.n_rows, device="cpu").clamp(max=self.zero)
        return tokens if self.site.order is None else tokens[self.site.order]

    @cached_property
    def _back(self):
        tokens = self._tokens
        back = tokens.new_empty(self.zero + 1)
        back[tokens] = torch.arange(len(tokens), device=tokens.device)
        return back[: self.zero]

    @cached_property
    def _seen(self):
        """Bool [r s, 1 + w^2, 1 + w^2]: the published mask where the windows reach beyond the image, else None."""
        w, axes = self.window, zip(self.grid, self.regions, strict=True)
        at = torch.arange(w, device="cpu")
        rows, columns = (at < n - (r - 1) * w for n, r in axes)
        if rows.all() and columns.all():
            return None
        right, below = columns.repeat(w), rows.repeat_interleave(w)
        right, below = (x.outer(x) for x in (F.pad(at, (1, 0), value=True) for at in (right, below)))
        seen = right.new_ones(*self.regions, *right.shape)
        seen[:, -1], seen[-1] = right, below
        # Either, where both would be meant: the last window attends to some of its padding, and weights know it so.
        seen[-1, -1] = right | below
        return seen.flatten(0, 1)

    @cached_property
    def _bias_indices(self):
        """Bias index of each pair of tokens of a window, int64 [1 + w^2, 1 + w^2]."""
        at = torch.arange(self.window, device="cpu")
        y, x = at.repeat_interleave(self.window), at.repeat(self.window)
        local = pattern.offset_index(y - y[:, None], x - x[:, None], self.window)
        return F.pad(local, (1, 0, 1, 0), value=(2 * self.window - 1) ** 2)

    def native(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The windows as one batch: q, k, v [B, H, r s (1 + w^2), D], bias [H, n]."""
        batch, length = len(q), 1 + self.window**2
        q, k, v = (x.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        mask = bias[:, attention_sites.resident(self, "_bias_indices", bias.device)][None]
        if self._seen is not None:
            hidden = torch.finfo(mask.dtype).min
            seen = attention_sites.resident(self, "_seen", mask.device)
            mask = torch.where(seen[:, None], mask, hidden).repeat(batch, 1, 1, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
