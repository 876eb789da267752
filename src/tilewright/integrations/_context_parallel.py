"""Slices where processes share the tokens of a sequence, by the parallel configuration of diffusers.

Its Ulysses form gives a process all tokens of some heads, as one process has them. Its ring form gives it some queries
and all keys: these are gathered, and groups of queries are those of one process, so that lists are, too.
"""

import hashlib
from functools import lru_cache
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core import _internals
from tilewright.core.errors import ConfigError
from tilewright.integrations.sdpa import Slices
from tilewright.slices import parallel


@_internals.uncompiled
def attend(
    dispatch: Any, name: str, attention: Slices, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *given: Any,
    lse: bool, config: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of this process's tokens, [B, n, H, D], over those of all, and its log-sum-exps [B, n, H] with `lse`.

    given: dropout_p, is_causal, scale and enable_gqa. Raises `ConfigError` where processes disagree, for both forms at
    once, and for gradients.
    """
    context = config.context_parallel_config
    ring, ulysses = context.ring_degree > 1, context.ulysses_degree > 1
    if ring == ulysses:
        raise ConfigError(
            f"{name}: expected one of ring_degree and ulysses_degree above 1, found {context.ring_degree} and "
            f"{context.ulysses_degree}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ConfigError(f"{name}: expected no gradient with a parallel configuration; call this under no_grad()")
    mesh = context._ring_mesh if ring else context._ulysses_mesh
    anything = getattr(context, "ring_anything" if ring else "ulysses_anything", False)
    tokens = _agreed(name, attention, mesh.get_group(), q, k, mask, anything)
    if ring:
        return _ring(attention, mesh.get_group(), tokens, q, k, v, mask, *given, lse=lse)
    if not anything and q.shape[2] % context.ulysses_degree:
        raise ConfigError(
            f"{name}: expected heads that {context.ulysses_degree} processes can share, found {q.shape[2]}; "
            "ulysses_anything=True takes any"
        )

    def forward(ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, **_):
        query, key, value = (_heads_first(x) for x in (query, key, value))
        stated = attn_mask, dropout_p, is_causal, scale, enable_gqa
        found = _tokens_first(attention.both(query, key, value, *stated, lse=return_lse, parts=len(tokens)))
        return found if return_lse else found[0]

    out = dispatch._templated_context_parallel_attention(
        q, k, v, mask, *given, lse, forward_op=forward, backward_op=None, _parallel_config=config
    )
    return out if lse else (out, None)


def _ring(attention, group, tokens, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, *, lse):
    """`attend` of some queries over all keys."""
    of_q, of_k = (parallel.shard([each[i] for each in tokens], group=group) for i in (0, 1))
    own = of_q.own_tokens
    q, k, v = (_heads_first(of.gather(x)) for of, x in ((of_q, q), (of_k, k), (of_k, v)))
    if mask is not None and mask.shape[-1] != k.shape[2]:
        mask = of_k.gather(mask, -1)
    given = dropout_p, is_causal, scale, enable_gqa
    return _tokens_first(attention.both(q, k, v, mask, *given, lse=lse, parts=len(tokens), own=own))


def _heads_first(x):
    return x.transpose(1, 2)


def _tokens_first(found):
    return tuple(None if x is None else x.transpose(1, 2) for x in found)


def _agreed(name, attention, group, q, k, mask, anything):
    """Queries and keys of each process. Raises `ConfigError` on all of them where they disagree.

    Processes tell each other in each call, on the host: one that has other settings would wait for ever.
    """
    place = attention.place
    said = {
        **msgspec.structs.asdict(attention.settings),
        "dense": attention.dense,
        "step, layer and branch": None if place is None else (place.step, place.layer, place.branch),
        "batch, heads and head dim": (q.shape[0], *q.shape[2:]),
        "type": q.dtype,
        "mask": mask is not None,
    } | ({} if anything else {"tokens": (q.shape[1], k.shape[1])})
    said = {what: repr(value) for what, value in said.items()}
    digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
    mine = torch.tensor([q.shape[1], k.shape[1], int.from_bytes(digest, "big")])
    group = _of_hosts(group)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    if any(each[2] != mine[2] for each in every):
        all_said: list[Any] = [None] * len(every)
        dist.all_gather_object(all_said, said, group=group)
        what, rank = next(
            (what, rank) for rank, other in enumerate(all_said) for what in said if other[what] != all_said[0][what]
        )
        found = f"{all_said[0][what]} on process 0 and {all_said[rank][what]} on process {rank}"
        raise ConfigError(f"{name}: expected the same {what} on all processes, found {found}")
    return [(int(each[0]), int(each[1])) for each in every]


@lru_cache(16)
def _of_hosts(group):
    """A group of the same processes that talks without a GPU."""
    if "gloo" in str(dist.get_backend(group)):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
