"""Slice lists that are kept across the denoising steps of a diffusion model: they change slowly from step to step."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.core import arguments
from tilewright.core.errors import PatternError
from tilewright.slices import prediction
from tilewright.slices.attention import attend, dense, merge
from tilewright.slices.budgets import Budgets
from tilewright.slices.layout import Layout, SliceLists
from tilewright.slices.lists import unpack
from tilewright.slices.remainder import rest
from tilewright.slices.settings import AMOUNTS


@dataclass(frozen=True)
class _Kept:
    """Lists of a layer and branch, or what they miss, from the step at which they were made.

    lists: `SliceLists`, or their packed bits with their layout and lengths. delta: dense attention less that by the
    lists.
    """

    step: int
    layout: Layout | None = None
    lists: Tensor | SliceLists | None = None
    lengths: Tensor | None = None
    delta: Tensor | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tensors."""
        lists = self.lists.tensors if isinstance(self.lists, SliceLists) else (self.lists,)
        return sum(x.nbytes for x in (*lists, self.lengths, self.delta) if x is not None)


class Steps:
    """Attention of a diffusion model's layers, by lists that are predicted at some steps and kept in between.

    ``steps(layer, step, branch, q, k, v) -> [B, H, N_q, D]``, where branch names a pass of a step, such as the one
    with the prompt and the one without. Nothing waits for the device.

    Lists serve one run of steps, such as those of a clip, from their refresh to the next one. A run ends where a layer
    comes to an earlier step, where `run` names another one, and with `clear`. Call `clear`, or name the runs, where
    one may begin at a later step than the last one ended with.

    Parameters
    ----------
    refresh : iterable of int
        Steps at which lists are predicted, from that step's q and k.
    first_dense : int
        So many first steps attend densely. Lists are predicted in them all the same where `refresh` says so.
    dense_layers : int
        So many first layers attend densely in every step, and keep nothing.
    shared : dict, optional
        Branches that take the lists of another one, which comes first in a step: ``{branch: the other}``.
    packed : bool
        Keep a bit for a pair, unpacked in each call; else whole lists, 32 bits for a listed pair.
    delta : bool
        At a refresh attend densely, keep what the lists miss, and add it in later steps: a tensor of q's size for each
        layer and branch.
    rest : bool
        Estimate what lists leave out, see `slices.rest`.
    budgets : Budgets, str or Path, optional
        A table, or its file, of the shares of the keys that heads list, by layer and part of a run: see
        `tilewright tune-slices`. A part needs a step of `refresh`: lists keep the shares of the step they are made at.
    joins : bool
        Predict lists at any step where none are kept: for a network that a run comes to late, such as the second
        expert of Wan 2.2.
    most_bytes : int, optional
        What may be kept in all, see `memory_bytes`; more is an error. None for no bound.
    predict : callable, optional
        ``predict(q, k, **options) -> SliceLists``; the default is `slices.predict`.
    **options
        Of `predict`.

    Raises
    ------
    PatternError
        For steps that are no numbers from 0 up, and for a table beside other amounts of keys.
    ArtifactError
        For a file that is no table.

    References
    ----------
    Lists that are kept: FG-Attn (arXiv 2509.16518) and DFSAttn. First steps and layers that stay dense: Sparse
    VideoGen. The delta: Chipmunk (arXiv 2506.03275).
    """

    def __init__(
        self,
        refresh: Iterable[int] = (0, 15, 30, 45),
        first_dense: int = 2,
        *,
        dense_layers: int = 0,
        shared: Mapping[Hashable, Hashable] | None = None,
        packed: bool = True,
        delta: bool = False,
        rest: bool = False,
        budgets: Budgets | str | Path | None = None,
        joins: bool = False,
        most_bytes: int | None = None,
        predict: Callable[..., SliceLists] | None = None,
        **options: Any,
    ) -> None:
        """Keep nothing yet."""
        steps = arguments.each(refresh)
        if steps is None:
            raise PatternError(f"refresh: expected steps, from 0 up, found {arguments.shown(refresh)}")
        self.refresh = tuple(arguments.whole("refresh", step, 0, error=PatternError) for step in steps)
        first_dense = arguments.whole("first_dense", first_dense, 0, error=PatternError)
        dense_layers = arguments.whole("dense_layers", dense_layers, 0, error=PatternError)
        for name, flag in (("packed", packed), ("delta", delta), ("rest", rest), ("joins", joins)):
            arguments.flag(name, flag)
        arguments.of_kind(Mapping, "branches by branch", PatternError, shared=shared)
        if predict is not None and not callable(predict):
            raise PatternError(f"predict: expected a function, found {arguments.shown(predict)}")
        if not self.refresh:
            raise PatternError("refresh: expected at least one step at which lists are predicted, found none")
        if most_bytes is not None:
            most_bytes = arguments.whole("most_bytes", most_bytes, 0, 2**63 - 1, PatternError)
        self.first_dense, self.dense_layers, self.joins, self.most_bytes = first_dense, dense_layers, joins, most_bytes
        self.shared, self.packed, self.delta, self.rest = dict(shared or {}), packed, delta, rest
        if chained := [branch for branch, other in self.shared.items() if other in self.shared]:
            raise PatternError(
                f"shared: expected branches that share lists of a branch with lists, found {chained[0]!r} of "
                f"{self.shared[chained[0]]!r}, which shares lists"
            )
        self.budgets = self._table(budgets, options)
        self._predict, self._options = predict, options
        self._kept: dict[tuple[str, int, Hashable], _Kept] = {}
        self._run: Hashable = None
        # The last step of each layer and branch.
        self._last: dict[tuple[int, Hashable], int] = {}

    def __call__(
        self,
        layer: int,
        step: int,
        branch: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None = None,
        run: Hashable = None,
        predict: Callable[..., SliceLists] | None = None,
    ) -> Tensor:
        """Attention [B, H, N_q, D] of q [B, H, N_q, D] over k, v [B, H, N_k, D].

        layer, step: from 0 up. lengths: int [B], the first keys of each batch entry that are attended to, as `predict`
        takes them; lists that are kept have those that they were predicted with. run: a name of the run of steps.
        predict: in place of the one that was given, in this call.
        Raises `PatternError` where lists are needed that the last refresh has not made in this run, and what `attend`,
        `dense` and the predictor raise.
        """
        if self.budgets is not None:
            self.budgets.check_call(layer, step, q.shape[1], q.shape[2])
        self._begin(layer, step, branch, run)
        if layer < self.dense_layers:
            return dense(q, k, v, lengths=lengths)[0]
        refreshed = step in self.refresh or (self.joins and self._missing(layer, step, branch))
        if refreshed and branch not in self.shared:
            self._store(layer, step, branch, q, k, lengths, predict or self._predict or prediction.predict)
        if refreshed and self.delta:
            whole = dense(q, k, v, lengths=lengths)[0]
            missed = whole - self._attend(q, k, v, self.lists(layer, step, branch))
            self._keep("delta", layer, branch, _Kept(step, delta=missed))
            return whole
        if step < self.first_dense:
            return dense(q, k, v, lengths=lengths)[0]
        out = self._attend(q, k, v, self.lists(layer, step, branch))
        return out + self._of("delta", layer, step, branch).delta if self.delta else out

    def _table(self, budgets, options):
        """A table as `Budgets`, or None. Raises `PatternError` for one that these steps cannot follow."""
        if budgets is None:
            return None
        table = budgets if isinstance(budgets, Budgets) else Budgets.load(budgets)
        if stated := [name for name in AMOUNTS if options.get(name) is not None]:
            raise PatternError(f"budgets: expected a table in place of {', '.join(stated)}, found both")
        if missed := set(range(len(table.begins))) - {table.part(step) for step in self.refresh}:
            begin = table.begins[min(missed)]
            raise PatternError(f"refresh: expected a step in each part of the table, found none in that from {begin}")
        return table

    def _begin(self, layer, step, branch, run):
        """Forget what is kept of another run."""
        if run != self._run:
            self.clear()
            self._run = run
        if step < self._last.get((layer, branch), 0):
            for what in ("lists", "delta"):
                self._kept.pop((what, layer, branch), None)
        self._last[layer, branch] = step

    def _attend(self, q, k, v, lists):
        if not self.rest:
            return attend(q, k, v, lists)
        return merge(attend(q, k, v, lists, lse=True), rest(q, k, v, lists))[0]

    def lists(self, layer: int, step: int, branch: Hashable) -> SliceLists:
        """The lists by which a layer attends at a step. Raises `PatternError` where none are kept."""
        return _unpacked(self._of("lists", layer, step, self.shared.get(branch, branch)))

    def _store(self, layer, step, branch, q, k, lengths, predict):
        """Predict lists and keep them."""
        given = {} if lengths is None else {"lengths": lengths}
        if self.budgets is not None:
            shares = self.budgets.of(step, layer)
            given |= {"keep": shares, "budget": max(shares)}
        lists = predict(q, k, **given, **self._options)
        kept = lists.pack() if self.packed else lists
        self._keep("lists", layer, branch, _Kept(step, lists.layout, kept, lists.lengths))

    def _keep(self, what, layer, branch, kept):
        """Keep it in place of what there was. Raises `PatternError` where that is more than `most_bytes`."""
        self._kept.pop((what, layer, branch), None)
        held = self.memory_bytes + kept.memory_bytes
        if self.most_bytes is not None and held > self.most_bytes:
            raise PatternError(
                f"most_bytes: expected at most {self.most_bytes} bytes of kept lists, found {held} with layer {layer}, "
                f"branch {branch!r}; {len(self._kept)} others are kept"
            )
        self._kept[what, layer, branch] = kept

    def _missing(self, layer, step, branch):
        """Whether a layer lacks something that it needs at `step`."""
        needed = {"lists": self.shared.get(branch, branch)} | ({"delta": branch} if self.delta else {})
        return any(self._fresh(what, layer, step, of) is None for what, of in needed.items())

    def _fresh(self, what, layer, step, branch):
        """What is kept, made at the last refresh before `step` or later; None for none, and for that of another run."""
        kept = self._kept.get((what, layer, branch))
        return None if kept is None or kept.step < self._made_at(step, -1) else kept

    def _made_at(self, step, otherwise=None):
        return max((at for at in self.refresh if at <= step), default=otherwise)

    def _of(self, what, layer, step, branch):
        """What is kept for a layer. Raises `PatternError` for none, and for that of another run."""
        fresh = self._fresh(what, layer, step, branch)
        if fresh is None:
            kept, made_at = self._kept.get((what, layer, branch)), self._made_at(step)
            found = "none" if kept is None else f"those of step {kept.step}, of another run"
            of_step = f"at one of the steps {', '.join(map(str, self.refresh))} before it"
            raise PatternError(
                f"step {step}: expected lists of layer {layer}, branch {branch!r}, made "
                f"{of_step if made_at is None else f'at step {made_at} of this run'}, found {found}"
            )
        return fresh

    def check(self) -> None:
        """Raise `PatternError` where kept lists did not fit, see `SliceLists.check`. Waits for the device."""
        for kept in self._kept.values():
            if kept.lists is not None:
                _unpacked(kept).check(allow_empty=True)

    def clear(self) -> None:
        """Forget what is kept: the next call begins a run."""
        self._kept.clear()
        self._last.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(kept.memory_bytes for kept in self._kept.values())


def _unpacked(kept):
    """Kept lists as `SliceLists`."""
    return kept.lists if isinstance(kept.lists, SliceLists) else unpack(kept.lists, kept.layout, kept.lengths)
