"""Attention of a sequence whose tokens are shared out among processes, each with a GPU of its own (stage T5).

A rank holds some consecutive tokens with all of their heads. For attention it changes them for some heads with all of
their tokens, predicts lists and attends as one process would, and changes back: two exchanges a layer, whatever the
attention. Works on every process group that has ``all_to_all_single``: NCCL between GPUs, Gloo between CPUs. Source:
DeepSpeed-Ulysses, arXiv 2309.14509; unequal shares and the tokens that every rank holds are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core.errors import DeviceError, PatternError
from tilewright.slices.attention import merge

# Torch 2.13 has another name for it and deprecates this one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Attention over whole sequences of some heads: three tensors [B, h, N, D] -> [B, h, N, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sharding:
    """Tokens and heads of each rank of a process group; `shard` makes it.

    Parameters
    ----------
    tokens, heads : tuple of int
        Numbers of each rank, in the order of ranks.
    rank : int
        Rank of this process.
    group : ProcessGroup, optional
        None for the default group.
    """

    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    rank: int
    group: "dist.ProcessGroup | None" = field(default=None, compare=False)

    @property
    def ranks(self) -> int:
        """Processes of the group, P."""
        return len(self.tokens)

    @property
    def own_tokens(self) -> slice:
        """Numbers of this rank's tokens in the sequence, as rotary tables and orders count them."""
        return _ranges(self.tokens)[self.rank]

    @property
    def own_heads(self) -> slice:
        """Numbers of this rank's heads."""
        return _ranges(self.heads)[self.rank]

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that every rank has whole.

        Parameters
        ----------
        x : Tensor
            With all N tokens in one dimension.
        dim : int
            Dimension of the tokens.

        Returns
        -------
        Tensor
            A view with this rank's n tokens.

        Raises
        ------
        PatternError
            For another number of tokens.
        """
        self._check_length("x", x, dim, sum(self.tokens))
        return x.narrow(dim, self.own_tokens.start, self.tokens[self.rank])

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens, on every rank, of a tensor of which each rank has its own tokens.

        Parameters
        ----------
        x : Tensor
            With this rank's n tokens in one dimension.
        dim : int
            Dimension of the tokens.

        Returns
        -------
        Tensor
            With all N tokens.

        Raises
        ------
        PatternError
            For another number of tokens.

        Notes
        -----
        A rank sends and receives P - 1 shares, each as long as the longest.
        """
        self._check_length("x", x, dim, self.tokens[self.rank])
        if self.ranks == 1:
            return x
        x = x.movedim(dim, 0)
        most = max(self.tokens)
        # All shares of one collective are of one length.
        sent = x.contiguous() if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        shares = x.new_empty(self.ranks * most, *x.shape[1:])
        _all_gather(shares, sent, group=self.group)
        parts = [share[:n] for share, n in zip(shares.split(most), self.tokens, strict=True)]
        return torch.cat(parts).movedim(0, dim)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
        *,
        replicated: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attention of this rank's tokens over the tokens of all ranks.

        Parameters
        ----------
        q, k, v : Tensor
            [B, H, n, D] of one type, with this rank's n tokens and stride 1 in the last dimension.
        attention : callable
            ``attention(q, k, v) -> out`` on [B, h, N, D], with this rank's h heads and all N tokens in their order.
            Tokens are 3 B h D values apart. The strides of its result are free; a result of `slices.attend` with B = 1
            is sent without a copy.
        replicated : (Tensor, Tensor, Tensor), optional
            q, k and v [B, H, t, D] of tokens that every rank has, such as those of text. `attention` gets them after
            the N tokens.

        Returns
        -------
        Tensor, or (Tensor, Tensor)
            [B, H, n, D], and with `replicated` the result [B, H, t, D] of these tokens, the same on every rank.

        Raises
        ------
        PatternError
            For tensors of other shapes, for an attention that returns another shape, and for tensors that need a
            gradient. The other ranks wait until the timeout of the process group.

        Notes
        -----
        A rank of P with equal shares sends 4 B N H D (P - 1) / P**2 values, see `sent_bytes`. The memory is twice this
        rank's q, k and v and once its received output, and another copy of it with B > 1 or replicated tokens. Only the
        process group makes the host wait.
        """
        self._check(q, k, v)
        if replicated is not None:
            self._check_replicated(q, *replicated)
        elif self.ranks == 1:
            return attention(q, k, v)
        whole = self._to_heads((q, k, v), replicated)
        out = attention(*whole)
        if out.shape != whole[0].shape or out.dtype != q.dtype:
            raise PatternError(
                f"attention: expected a result {tuple(whole[0].shape)} of {q.dtype}, found {tuple(out.shape)} of "
                f"{out.dtype}"
            )
        return self._to_tokens(out, 0 if replicated is None else replicated[0].shape[2])

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of this rank's tokens over all keys, from parts over each rank's keys.

        Parameters
        ----------
        out : Tensor
            [B, H, N, D], attention of all queries over this rank's keys, as `slices.attend` and `slices.dense` return
            it.
        lse : Tensor
            float32 [B, H, N], its natural log-sum-exps.

        Returns
        -------
        (Tensor, Tensor)
            [B, H, n, D] and float32 [B, H, n], joined as by `slices.merge`.

        Raises
        ------
        PatternError
            For tensors of other shapes.

        Notes
        -----
        It serves networks of fewer heads than ranks. With the queries, which have to be gathered first, a rank sends
        about 2 B N H D (P - 1) / P values, P / 2 times as many as for `attend`.
        """
        self._check_length("out", out, 2, sum(self.tokens))
        if lse.shape != out.shape[:-1]:
            raise PatternError(f"lse: expected shape {tuple(out.shape[:-1])}, as of out, found {tuple(lse.shape)}")
        parts = zip(self._swap(out), self._swap(lse), strict=True)
        return merge(*parts)

    def sent_bytes(self, batch: int, head_dim: int, itemsize: int, replicated: int = 0) -> int:
        """Bytes that this rank sends to others in a call of `attend`. replicated: tokens that every rank holds."""
        n, h = self.tokens[self.rank], self.heads[self.rank]
        others = sum(self.tokens) - n + (self.ranks - 1) * replicated
        return batch * head_dim * itemsize * (3 * n * (sum(self.heads) - h) + others * h)

    def _swap(self, x):
        """What each rank has for this rank's tokens, from what this rank has for all: [B, H, N, ...]."""
        sent = x.movedim(2, 0).contiguous()
        row, n = sent[0].numel(), self.tokens[self.rank]
        found = sent.new_empty(self.ranks * n * row)
        sizes = [m * row for m in self.tokens]
        dist.all_to_all_single(found, sent.view(-1), [n * row] * self.ranks, sizes, group=self.group)
        return found.view(self.ranks, n, *sent.shape[1:]).movedim(1, 3).unbind()

    def _to_heads(self, tensors, replicated):
        """Three tensors [B, H, n, D] of this rank's tokens, as [B, h, N + t, D] of its heads."""
        batch, _, n, dim = tensors[0].shape
        sizes = [n * batch * 3 * h * dim for h in self.heads]
        sent = tensors[0].new_empty(sum(sizes))
        for part, heads in zip(sent.split(sizes), _ranges(self.heads), strict=True):
            _fill(part.view(n, batch, 3, -1, dim), tensors, heads)
        # Tokens lie outermost: what ranks send is in place as it arrives, and what is replicated follows.
        total, h = sum(self.tokens), self.heads[self.rank]
        rest = 0 if replicated is None else replicated[0].shape[2]
        whole = sent.new_empty(total + rest, batch, 3, h, dim)
        received = [m * batch * 3 * h * dim for m in self.tokens]
        dist.all_to_all_single(whole[:total].view(-1), sent, received, sizes, group=self.group)
        if replicated is not None:
            _fill(whole[total:], replicated, self.own_heads)
        return [x.permute(1, 2, 0, 3) for x in whole.unbind(2)]

    def _to_tokens(self, out, rest):
        """A result [B, h, N + rest, D] of this rank's heads, as [B, H, n, D] of its tokens and that of the rest."""
        batch, h, _, dim = out.shape
        out = out.permute(2, 0, 1, 3)
        *parts, replicated = out.split([*self.tokens, rest])
        sent = torch.cat([x for part in parts for x in (part, replicated)]) if rest else out.contiguous()
        row = batch * dim
        sizes = [(m + rest) * row * h for m in self.tokens]
        n = self.tokens[self.rank] + rest
        received = [n * row * heads for heads in self.heads]
        shares = out.new_empty(sum(received))
        dist.all_to_all_single(shares, sent.view(-1), received, sizes, group=self.group)
        # Heads of a token side by side, as the next layer reads them.
        found = torch.cat([x.view(n, batch, -1, dim).transpose(0, 1) for x in shares.split(received)], 2).transpose(
            1, 2
        )
        return found if not rest else found.split([n - rest, rest], 2)

    def _check(self, q, k, v):
        """Raise `PatternError` unless q, k and v are this rank's tokens, with all of their heads."""
        if min(self.heads) < 1:
            raise PatternError("heads: expected a sharding that was made with a number of them, found none")
        expected = (*q.shape[:1], sum(self.heads), self.tokens[self.rank], *q.shape[3:])
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or tuple(x.shape) != expected:
                raise PatternError(
                    f"{name}: expected (B, {sum(self.heads)} heads, {self.tokens[self.rank]} tokens, D) on rank "
                    f"{self.rank}, B and D as of q, found {tuple(x.shape)}"
                )
            _check_type(name, x, q)

    def _check_replicated(self, q, *replicated):
        """Raise `PatternError` unless three tensors are tokens that go with q."""
        batch, heads, _, dim = q.shape
        for name, x in zip(("q", "k", "v"), replicated, strict=True):
            if x.ndim != 4 or tuple(x.shape) != (batch, heads, replicated[0].shape[-2], dim):
                raise PatternError(
                    f"replicated {name}: expected ({batch}, {heads}, t, {dim}), t as of its q, found {tuple(x.shape)}"
                )
            _check_type(f"replicated {name}", x, q)

    def _check_length(self, name, x, dim, expected):
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != expected:
            raise PatternError(
                f"{name}: expected {expected} tokens in dimension {dim} on rank {self.rank}, found shape "
                f"{tuple(x.shape)}"
            )


def shard(tokens: int | Sequence[int], heads: int | None = None, group: "dist.ProcessGroup | None" = None) -> Sharding:
    """Share out the tokens and the heads of a sequence among the ranks of a process group.

    Parameters
    ----------
    tokens : int or sequence of int
        Tokens of the sequence, or of each rank; the same on every rank.
    heads : int, optional
        Number of heads, H. `Sharding.attend` needs it.
    group : ProcessGroup, optional
        None for the default group, of P ranks.

    Returns
    -------
    Sharding
        If P does not divide a number, the first ranks have one token, or head, more than the others.

    Raises
    ------
    DeviceError
        Without a process group.
    PatternError
        For fewer tokens or heads than ranks.

    Notes
    -----
    Nothing is exchanged: each rank computes the same shares.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DeviceError("expected a process group, found none; call torch.distributed.init_process_group first")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise DeviceError(f"expected a process group of this process, rank {dist.get_rank()}, found one of others")
    shares = _shares(tokens, ranks) if isinstance(tokens, int) else tuple(tokens)
    if len(shares) != ranks or min(shares) < 1:
        raise PatternError(f"tokens: expected a number from 1 for each of {ranks} ranks, found {shares}")
    if heads is not None and heads < ranks:
        raise PatternError(f"heads: expected at least one for each of {ranks} ranks, found {heads}")
    return Sharding(shares, _shares(heads or 0, ranks), rank, group)


def _shares(total, ranks):
    """`total` things shared out among `ranks`, as evenly as can be."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def _ranges(shares):
    """The slices of a sequence that shares, side by side, make up."""
    return [slice(lo, hi) for lo, hi in pairwise(accumulate(shares, initial=0))]


def _fill(memory, tensors, heads):
    """Write heads of three tensors [B, H, n, D] into memory [n, B, 3, h, D]."""
    for i, x in enumerate(tensors):
        memory[:, :, i].copy_(x[:, heads].permute(2, 0, 1, 3))


def _check_type(name, x, q):
    if x.dtype != q.dtype or x.device != q.device:
        raise PatternError(f"{name}: expected {q.dtype} on {q.device}, as q, found {x.dtype} on {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise PatternError(f"{name}: the exchange has no backward; call this under torch.no_grad()")
