"""The attention operator for engineers: ``plan = tilewright.plan(pattern, …); out = plan(q, k, v)``.

`plan` carries a pattern through the same stages as the study (order, blocks, profile, schedule) and hands the
schedule to the device's executor. Calls that are compiled or traced go through the registered operator (`operators`),
others straight to the executor.
"""

import contextlib
import json
import logging
import math
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewright import devices, graph
from tilewright.attention import backends, blocks, native, patterns, profile, reorder, schedule
from tilewright.attention.blocks.cut import best_gathered, functions
from tilewright.attention.blocks.tiles import fitting
from tilewright.attention.blocks.tiles import parse as parse_tile
from tilewright.attention.masks import Bias
from tilewright.attention.measure import beside_torch, elsewhere, expected
from tilewright.attention.reorder import NAMES as ORDERS
from tilewright.attention.reorder._tuning import on_grid
from tilewright.attention.schedule.problem import check_inputs
from tilewright.attention.schedule.search import NAMES as SOLVERS
from tilewright.attention.units import Units
from tilewright.core import _internals, arguments, artifacts, contents, operators
from tilewright.core.errors import (
    ArtifactError,
    ConfigError,
    DeviceError,
    InfeasibleError,
    PatternError,
    TileError,
    UnknownNameError,
    VersionError,
)
from tilewright.core.provenance import sha256_arrays
from tilewright.core.version import __version__
from tilewright.devices import qkv
from tilewright.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix
    from torch.nn.attention.flex_attention import BlockMask

    MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    Pattern: TypeAlias = Graph | sparray | spmatrix | NDArray | Tensor | BlockMask | MaskMod | str | Path

KIND = "plan"
VERSION = 1

_LOG = logging.getLogger(__name__)
# Rows of the groups that orders are compared by.
_GROUP_ROWS = 64
# ASSUME: an order whose groups, padded to the smallest tile, cost so many times as much as another's is not faster:
# masks add a half at most. To tile an order without any locality takes longer than all else.
_HOPELESS = 1.5
# Orders are tiled side by side up to so many rows, with so many processors for each: its tiles are side by side, too.
_MOST_ROWS, _TILES = 1 << 17, 4
# The index of a bias is evaluated for this many (query, key) pairs at a time.
_INDEX_PAIRS = 1 << 24

# Heads, and channels of one, that a plan is made for. ASSUME: who asks for more has mistaken an argument.
_MOST = 65535
# Of torch's generators.
_SEEDS = 2**64 - 1

# Held while an executor is prepared: calls of several threads may come first.
_PREPARING = threading.RLock()


def _renew_lock():
    global _PREPARING
    _PREPARING = threading.RLock()


# A thread that held it does not live on in a fork.
os.register_at_fork(after_in_child=_renew_lock)


def plan(
    pattern: "Pattern",
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    reorder: str = "auto",
    tiles: Sequence[str] | None = None,
    solver: str = "highs",
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    shape: tuple[int, int] | None = None,
    split_keys: int | Literal["auto"] | None = "auto",
    region_rows: int = 128,
    time_limit_s: float = 10.0,
    seed: int = 0,
    by: Literal["head", "image"] = "head",
    images: int | None = None,
) -> "Plan":
    """Order, tile, profile and schedule an attention pattern; return a callable `Plan`.

    Parameters
    ----------
    pattern : array, tensor, sparse matrix, Graph, path, BlockMask or callable
        Which query may attend to which key: a scipy sparse matrix; a boolean (or 0/1) array or tensor [N_q, N_k] on
        any device; a `Graph`, or the path of a graph or mask file; a FlexAttention ``BlockMask``; or a FlexAttention
        ``mask_mod(b, h, q_idx, kv_idx)`` with `shape`, which is evaluated on the plan's device, or on the CPU where
        its tensors lie there. Where heads or images differ: an array [H, N_q, N_k] or [B, H or 1, N_q, N_k], a
        ``BlockMask`` or ``mask_mod`` that depends on them, or a list of patterns, see `by`. Equal patterns share
        blocks and masks.
    heads, head_dim : int
        Of the tensors that the plan will be called with.
    dtype : torch.dtype
        float32, float16 or bfloat16.
    device : str or torch.device
        ``cpu`` or ``cuda``, the current GPU.
    reorder : str
        An order: ``none``, ``rcm``, ``ic``, ``hc`` or ``window``. ``auto`` takes the best of the model's own windows,
        ``none``, ``ic`` and ``hc``: on a GPU by predicted time, else by gathered work. `Plan.summary` states the
        numbers.
    tiles : sequence of str, optional
        Names such as ``("64x1", "64x64")``. None takes the device's own that fit the pattern, and torch's own attention
        in their place where that is faster; `Plan.summary` says so.
    solver : str
        ``highs``, ``gurobi``, ``descent`` or ``greedy``; ``highs-paper`` and ``gurobi-paper`` have the published
        objective. Each answer but greedy's is at least as fast in prediction as greedy's and as each tile alone.
    bias : Bias or Tensor, optional
        A `Bias`, or [H, N_q, N_k]. Minus infinity forbids a pair. The values are copied now; `Plan.with_bias` takes
        others.
    scale : float, optional
        Of the scores, finite; the default is ``head_dim ** -0.5``.
    shape : (int, int), optional
        N_q and N_k of a ``mask_mod``.
    split_keys : int or None
        Most keys of one work item; longer ones are split and merged. None is no limit, ``auto`` the device's.
    region_rows : int
        Most queries of a region, which has one tile.
    time_limit_s : float
        Most seconds of the solver.
    seed : int
        Of what is drawn: timed tensors, and orders that break ties.
    by : str
        What a list of patterns, or an array of three dimensions, has one for: ``head`` or ``image``. The entries of a
        list by image may be lists by head.
    images : int, optional
        Images of a batch, for a ``mask_mod`` that depends on the batch entry. A plan whose patterns differ by image
        takes batches of that number alone.

    Returns
    -------
    Plan
        ``plan(q, k, v)`` of [B, H, N, D] computes attention over the pattern.

    Raises
    ------
    TilewrightError
        Subclasses that name what was expected, what was found and what is known.

    Examples
    --------
    >>> import torch
    >>> import tilewright as tw
    >>> near = (torch.arange(256)[:, None] - torch.arange(256)).abs() <= 16
    >>> plan = tw.plan(near, heads=2, head_dim=32)
    >>> q, k, v = torch.randn(3, 1, 2, 256, 32)
    >>> plan(q, k, v).shape
    torch.Size([1, 2, 256, 32])
    """
    # `reorder` is the argument's published name; the family of that name is reached through its function.
    heads, head_dim = (
        arguments.whole(name, value, most=_MOST) for name, value in (("heads", heads), ("head_dim", head_dim))
    )
    scale = None if scale is None else arguments.number("scale", scale, error=PatternError)
    dtype_name, kind = _dtype_name(dtype), _kind(device)
    arguments.name_of("order", reorder, ("auto", *ORDERS))
    arguments.name_of("solver", solver, SOLVERS)
    if split_keys is not None and not (isinstance(split_keys, str) and split_keys == "auto"):
        split_keys = arguments.whole("split_keys", split_keys)
    region_rows, seed = arguments.whole("region_rows", region_rows), arguments.whole("seed", seed, 0, _SEEDS)
    time_limit_s = arguments.number("time_limit_s", time_limit_s, above=0)
    tiles = None if tiles is None else _tile_names(tiles)
    description, defaults = devices.describe(kind), devices.facts(kind)
    limits = devices.limits(description)
    found_patterns, units = patterns.read(pattern, heads=heads, kind=kind, shape=shape, by=by, images=images)
    unordered = found_patterns[0] if units is None else graph.union(found_patterns)
    if bias is not None:
        in_order = np.arange(unordered.n_rows), np.arange(unordered.n_cols)
        _check_bias(bias, heads, unordered.shape, _allowed(unordered, *in_order))
    names = tiles or fitting(defaults.TILES, unordered.shape, defaults.FEWEST_ROWS)
    # ASSUME: of several patterns, each is predicted for the heads that one has on average.
    share = heads if units is None else units.share
    options: dict[str, Any] = dict(heads=share, head_dim=head_dim, dtype=dtype_name)
    options["split_keys"] = defaults.SPLIT_KEYS if split_keys == "auto" else split_keys
    bias_heads = None if bias is None else share
    fewest_rows = min((parse_tile(name).rows for name in names), default=1)

    def stacked(ordered):
        return ordered if units is None else _stacked(found_patterns, ordered)

    def tiled(ordered):
        return blocks.extract_all(ordered, [parse_tile(name) for name in names], region_rows)

    def profiled(made):
        return expected(made, device=kind, seed=seed, bias_heads=bias_heads, **options)

    if reorder == "auto" and backends.predicts(kind):
        ordered_graph, order_info, blocks_by_tile, profiles, alone = _fastest(
            unordered, lambda ordered: _order_cost(ordered, fewest_rows), tiled, profiled, limits, stacked
        )
    else:
        ordered_graph, order_info = _reorder(unordered, reorder, stacked)
        blocks_by_tile = tiled(ordered_graph)
        profiles = profiled(blocks_by_tile)
        alone = None if defaults.MIXES else _best_tile(blocks_by_tile, profiles, limits)[1]
    if alone is not None and not defaults.MIXES:
        blocks_by_tile, profiles = {alone: blocks_by_tile[alone]}, {alone: profiles[alone]}
    # Who names tiles, or a baseline of the solvers, asks for tiles.
    beside = tiles is None and schedule.compares(solver)
    if beside:
        profiles = beside_torch(profiles, ordered_graph, heads=heads, seed=seed, units=units, bias=bias)
    settings: dict[str, Any] = dict(solver=solver, time_limit_s=time_limit_s, seed=seed)
    found = schedule.solve(blocks_by_tile, profiles, limits, **settings, doubted=True, beside_torch=beside)
    if beside:
        sizes = dict(device=kind, heads=heads, head_dim=head_dim, dtype=dtype_name, units=units, bias=bias, seed=seed)
        torch_us = native.in_turns(found, blocks_by_tile, ordered_graph, **sizes)
        profiles = {name: replace(of, torch_us=torch_us) for name, of in profiles.items()}
        found = schedule.choose(found, torch_us)
    return Plan(ordered_graph, blocks_by_tile, profiles, found, bias=bias, scale=scale, reorder=order_info, units=units)


def load(path: str | Path) -> "Plan":
    """Read a plan that `Plan.save` wrote, and check its contents.

    Parameters
    ----------
    path : str or Path
        Of the file.

    Returns
    -------
    Plan
        Where versions or the number of threads differ from those it was made with, a warning says so: results are
        right, and the schedule may no longer be the fastest.

    Raises
    ------
    ArtifactError
        For a damaged or foreign file, and for one of another format, with what to do.
    DeviceError
        Elsewhere than on a device of the name that it was profiled on.
    """
    path = arguments.path("path", path)
    with tempfile.TemporaryDirectory() as folder:
        artifacts.unpack(path, folder, KIND, "plan.json")
        try:
            return _load(Path(folder), path)
        except ArtifactError as error:
            # People know the plan's path, not that of the folder it was unpacked to.
            found = str(error).replace(f"{folder}/", f"{path}: ")
            if isinstance(error, VersionError):
                raise VersionError(f"{found}; {_advice(error, Path(folder))}", error.newer) from error
            raise ArtifactError(found if found.startswith(f"{path}: ") else f"{path}: {found}") from error


def _advice(error, folder):
    """What to do about a plan of another version, unpacked to `folder`."""
    try:
        writer = json.loads((folder / "plan.json").read_bytes())["made_by"]["tilewright"]
    except (OSError, ValueError, KeyError, TypeError):
        writer = None
    of = "" if writer is None else f" {writer}"
    if error.newer:
        return (
            f"a newer tilewright{of} wrote this plan: upgrade this one, {__version__}, or plan the pattern again here"
        )
    return f"an older tilewright{of} wrote this plan: plan the pattern again and save it"


class Plan:
    """A scheduled attention operator for one pattern. Several threads, and several GPUs of one kind, may call it.

    Attributes
    ----------
    heads, head_dim : int
        Attention heads H and their dimension D.
    dtype : torch.dtype
        Type of the tensors, such as ``torch.float32``.
    device : str
        Kind of device, ``cpu`` or ``cuda``.
    row_order, col_order : Tensor
        int64 [N_q] and [N_k]: plan order of queries and keys, ``order[new] = old``.
    graph : Graph
        The pattern in plan order; of several patterns, one above the other.
    units : Units or None
        Which of several patterns each head or image has.
    schedule, blocks, profiles
        Results of the stages, see docs/scheduling.md.
    """

    def __init__(
        self,
        ordered_graph: Graph,
        blocks_by_tile: dict[str, blocks.Blocks],
        profiles: dict[str, profile.Profile],
        work_list: schedule.Schedule,
        *,
        bias: Bias | Tensor | None = None,
        scale: float | None = None,
        reorder: dict[str, Any],
        units: Units | None = None,
    ) -> None:
        """Assemble a plan from the stages' results; `plan` and `load` are the usual ways to get one."""
        if ordered_graph.row_order is None or ordered_graph.col_order is None:
            raise PatternError("expected a graph that `reorder.apply` returns, found one without an order")
        self.graph, self.blocks, self.profiles, self.schedule = ordered_graph, blocks_by_tile, profiles, work_list
        self.bias, self.scale, self.reorder = _by_value(bias), scale, reorder
        any_profile = next(iter(profiles.values()))
        self.units, self.head_dim = units, any_profile.head_dim
        self.heads = any_profile.heads if units is None else units.heads
        n_q, n_k = ordered_graph.shape
        self.shape = n_q // (1 if units is None else units.patterns), n_k
        self.dtype, self.device = getattr(torch, any_profile.dtype), any_profile.device["kind"]
        self.row_order = torch.from_numpy(ordered_graph.row_order[: self.shape[0]].astype(np.int64))
        self.col_order = torch.from_numpy(ordered_graph.col_order.astype(np.int64))
        if not self._takes(bias):
            # As of the layers of a stage, which have biases of their own and share a schedule.
            self.schedule = schedule.choose(work_list, {})
        # By order and device, and whether tiles run in any case.
        self._prepared: dict[tuple[bool, int, bool], Any] = {}
        # Of the last values of a bias that a call gave: these, and the executor with them.
        self._valued: dict[tuple[bool, int, bool], tuple[Tensor, Any]] = {}
        # By `ordered`, the executor of the last call, where it knows of its calls.
        self._called: dict[bool, Any] = dict.fromkeys((False, True), native.Unprepared())
        self._digest: str | None = None
        self._bytes: Tensor | None = None
        self._name = operators.register(self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, ordered: bool = False, bias: Tensor | None = None) -> Tensor:
        """Attention over the pattern.

        Parameters
        ----------
        q, k, v : Tensor
            [B, H, N_q, D], and k and v [B, H, N_k, D], of the plan's type and device.
        ordered : bool
            Tokens are in plan order, ``q[:, :, plan.row_order]``, and so is the result.
        bias : Tensor, optional
            Values instead of those of the plan's bias: the table [H, T] of its `Bias`, or dense [H, N_q, N_k].

        Returns
        -------
        Tensor
            [B, H, N_q, D]. Queries without keys get zeros.

        Raises
        ------
        PatternError, DeviceError
            For tensors of other shapes, types or devices, and for tensors that need a gradient on a device without a
            backward.

        Notes
        -----
        Plans are differentiable once, in q, k, v and the bias. A GPU reads the values of the bias in each call, also in
        a replay of a CUDA graph. A CPU fills its masks again if the values have changed since the last call.
        """
        # A compiler guards what is asked of it.
        compiled = torch.compiler.is_dynamo_compiling()
        if not compiled and (ordered is False or ordered is True) and operators.forward_level() < 0:
            # Of tensors that are alike all is known: that none needs a gradient, and that nobody watches, too.
            out = self._again(q, k, v, ordered, bias, True)
            if out is not None:
                return out
        if compiled or operators.watched(q):
            if not all(isinstance(x, Tensor) for x in (q, k, v)):
                raise _no_tensors(q, k, v)
            # Compilers hold the digest for a constant, and guard what they compile by it, as it is read behind. What is
            # compiled for a layer then serves others whose plans are equal. A program that is exported holds the plan's
            # file. Dynamo, which traces no files, holds the digest alone.
            held = self._file() if not compiled and operators.exporting() else None
            known = self.digest() and self._digest
            return operators.traced(q, k, v, known, ordered, held, bias)
        try:
            recorded = operators.records(q, k, v, bias)
        except AttributeError:
            raise _no_tensors(q, k, v, bias) from None
        if recorded:
            return operators.differentiated(q, k, v, self._name, ordered, bias)
        executor = self._executor(q, ordered, bias)
        self._remember(ordered, executor, bias)
        return executor.ready(q, k, v)[1](q, k, v) if isinstance(executor, native.Executor) else executor(q, k, v)

    def _again(self, q, k, v, ordered, bias, any_layout):
        """The result for tensors like those of the last call, None for others; any_layout: also by head."""
        executor = self._called[ordered]
        if bias is not None:
            return executor.again(q, k, v, bias)
        like, call, as_queries = executor.known
        return call(q, k, v) if like(q, k, v) and (any_layout or not as_queries) else None

    def _remember(self, ordered, executor, bias):
        """From now on, what `executor` knows of its calls is asked first. One of other values of a bias lasts no longer
        than its call."""
        if bias is not None:
            executor = getattr(executor, "base", None)
        if self._called[ordered] is not executor and hasattr(executor, "known"):
            self._called = self._called | {ordered: executor}

    def of_projection(self, x: Tensor, *, ordered: bool = False) -> Tensor:
        """Attention of the queries, keys and values that one projection of tokens makes, at less cost for the host.

        Parameters
        ----------
        x : Tensor
            [B, N, 3 H D], queries first.
        ordered : bool
            As in a call.

        Returns
        -------
        Tensor
            [B, N, H D].

        Raises
        ------
        PatternError, DeviceError
            As a call.
        """
        compiled = torch.compiler.is_dynamo_compiling()
        if not compiled and (ordered is False or ordered is True) and operators.forward_level() < 0:
            joint = self._called[ordered].joint
            if joint[0](x) and (out := joint[1](x)) is not None:
                return out
        nested = not isinstance(x, Tensor) or x.is_nested
        if nested or x.ndim != 3 or x.shape[2] != 3 * self.heads * self.head_dim:
            width = 3 * self.heads * self.head_dim
            raise PatternError(f"x: expected a tensor [B, N, {width}], found {arguments.shown(x)}")
        x = x.contiguous()
        arguments.flag("ordered", ordered)
        plain = not (compiled or operators.watched(x) or operators.records(x, x, x)) and x.numel() > 0
        if plain and (joints := getattr(self._called[ordered], "joints", None)) is not None:
            found = joints.find(x)
            if found is not None and (out := found[1](x)) is not None:
                return out
        out = self(*qkv.split(x, self.heads), ordered=ordered)
        if plain and (join := getattr(self._called[ordered], "join", None)) is not None:
            join(x)
        return out.transpose(1, 2).flatten(2)

    def with_bias(self, bias: Bias | Tensor | None) -> "Plan":
        """This plan with another bias, and the same order, blocks and schedule.

        Parameters
        ----------
        bias : Bias, Tensor or None
            A `Bias`, or a tensor [H, N_q, N_k]. Its values are copied.

        Returns
        -------
        Plan

        Raises
        ------
        PatternError
            For a bias of another shape.

        Notes
        -----
        ASSUME: the layers of a network stage share one schedule, profiled without their biases.
        """
        if bias is not None:
            _check_bias(bias, self.heads, self.shape, _natural(self.graph, self.shape[0]))
        return self._maker(bias)()

    def _takes(self, bias):
        """Whether what the schedule runs takes such a bias, see `native.able`. Raises `PatternError`."""
        name = self.schedule.form
        if name is None:
            return True
        form = native.forms(self.graph, self.units).get(name)
        if form is None:
            raise PatternError(f"the schedule runs {self.schedule.runs}, a form that the pattern does not have")
        sizes: dict[str, Any] = dict(device=self.device, heads=self.heads, dtype=self.dtype, units=self.units)
        return native.able(form, **sizes, biased=bias is not None)

    def _maker(self, bias):
        settings: dict[str, Any] = {"bias": bias, "scale": self.scale, "reorder": self.reorder, "units": self.units}
        return partial(Plan, self.graph, self.blocks, self.profiles, self.schedule, **settings)

    def __reduce__(self) -> tuple[Callable[[], "Plan"], tuple[()]]:
        # Made anew: executors and names are of one process.
        return self._maker(self.bias), ()

    def __deepcopy__(self, memo: dict) -> "Plan":
        # A plan does not change: the copies of a module share it.
        return self

    @_internals.constant
    def digest(self) -> str:
        """The name by which exported programs call this plan, the same in every process and for a plan that was loaded.

        It depends on all that the result does, to the last bit: the pattern and its order, heads, head dim, dtype,
        scale, the values of the bias, the blocks and the schedule. Computed when it is first asked for.
        """
        if self._digest is None:
            # In a separate thread, where nothing traces what a bias computes.
            with ThreadPoolExecutor(1) as apart:
                self._digest = apart.submit(self._content).result()
        return self._digest

    def _content(self):
        """Digest of what the results depend on."""
        s, scale = self.schedule, None if self.scale is None else float(self.scale)
        units = () if self.units is None else (self.units,)
        runs = () if s.form is None else (s.runs,)
        facts = self.device, self.heads, self.head_dim, self.dtype, scale, s.tiles, s.blocks_ids, s.split_keys, *units
        # As a file holds them. Where an item was predicted to run does not matter.
        work = [
            np.asarray(getattr(s, n), dtype) for n, dtype in schedule.COLUMNS.items() if n not in ("lane", "start_us")
        ]
        return sha256_arrays(
            repr((*facts, *runs)), self.graph.id, *work, *_bias_content(self.bias, self.graph, self.shape[0])
        )[:32]

    def _file(self):
        """What `save` writes, uint8 [bytes]: one tensor for all programs that hold it."""
        if self._bytes is None:
            # In a separate thread, where nothing traces what is written.
            with ThreadPoolExecutor(1) as apart:
                self._bytes = apart.submit(_written, self).result()
        return self._bytes

    @property
    def any_batch(self) -> bool:
        """Whether batches may have any number of images: not where patterns differ by image."""
        return self.units is None or self.units.by == "head"

    def run(self, q: Tensor, k: Tensor, v: Tensor, ordered: bool, bias: Tensor | None = None) -> Tensor:
        """The call behind the registered operator. The executor, prepared once for each device, checks and executes."""
        out = self._again(q, k, v, ordered, bias, False)
        if out is not None:
            return out
        executor = self._executor(q, ordered, bias)
        self._remember(ordered, executor, bias)
        return executor(q, k, v)

    def _executor(self, q, ordered, bias=None, tiles=False):
        """What runs a call; tiles: of the work list, whatever the schedule runs."""
        if bias is not None:
            return self._with_values(q, ordered, bias, tiles)
        try:
            executor = self._prepared.get(key := (ordered, q.get_device(), tiles))
        except TypeError:
            # No dict takes it.
            executor = None
        if executor is None:
            arguments.flag("ordered", ordered)
            with _PREPARING, torch.cuda.device_of(q):
                executor = self._prepared.get(key)
                if executor is None:
                    executor = self._prepared[key] = self._prepare(ordered, tiles=tiles)
        return executor

    def _with_values(self, q, ordered, bias, tiles):
        """The executor for these values of the bias: one that reads them where they are, or the last one where they are
        the same."""
        self._check_values(q, bias)
        if getattr(backends.executor(self.device), "READS_TABLES", False):
            return self._executor(q, ordered).with_bias(bias.flatten(1))
        key = ordered, q.get_device(), tiles
        before, executor = self._valued.get(key, (None, None))
        if before is None or before.dtype != bias.dtype or not torch.equal(before, bias.detach()):
            # A table of its own type is compared: to a wider type, values would have to be copied in each call.
            before = bias.detach().clone()
            taken = _by_value(Bias(before, self.bias.index) if isinstance(self.bias, Bias) else before)
            with _PREPARING, torch.cuda.device_of(q):
                filled = getattr(executor, "with_bias", None)
                if filled is None:
                    executor = self._prepare(ordered, taken, tiles)
                else:
                    executor = filled(taken.table if isinstance(taken, Bias) else taken.flatten(1))
            # At once: other threads may call with other values.
            self._valued[key] = before, executor
        return executor

    def _check_values(self, q, bias):
        """Raise `PatternError` for values of another form than those that the plan was made with."""
        own = self.bias.table if isinstance(self.bias, Bias) else self.bias
        if not isinstance(bias, Tensor) or bias.is_nested:
            raise PatternError(f"bias: expected a tensor, found {arguments.shown(bias)}")
        if own is None or bias.shape != own.shape or not bias.is_floating_point() or bias.device != q.device:
            planned = "none" if own is None else f"a float tensor {list(own.shape)} on {q.device}"
            raise PatternError(
                f"bias: expected {planned}, as planned; found {bias.dtype} {list(bias.shape)} on {bias.device}"
            )

    def gradients(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        ordered: bool,
        bias: Tensor | None = None,
        of_bias: bool = False,
    ) -> tuple[Tensor, ...]:
        """The call behind the backward of the registered operator: those of q, k, v, and `of_bias`, contiguous."""
        self.check_backward()
        executor = self._executor(q, ordered, bias)
        with torch.no_grad():
            if isinstance(executor, native.Executor) and executor.differentiates and not of_bias:
                found = executor.gradients(q, k, v, out, grad)
            else:
                executor = self._executor(q, ordered, bias, tiles=True)
                module = backends.backward(self.device)
                differentiated = module.gradients_with_bias if of_bias else module.gradients
                found = differentiated(executor, q, k, v, out, grad)
            if of_bias and bias is not None:
                found = (*found[:3], found[3].view(bias.shape).to(bias.dtype))
        return tuple(x.contiguous() for x in found)

    def check_backward(self) -> None:
        """Raise `PatternError` where this plan's device has no backward."""
        if not backends.differentiates(self.device):
            raise PatternError(f"plans for {self.device} have no backward: call them under torch.no_grad()")

    def _prepare(self, ordered, bias=None, tiles=False):
        options: dict[str, Any] = dict(heads=self.heads, head_dim=self.head_dim, dtype=self.dtype, scale=self.scale)
        options |= dict(row_order=np.asarray(self.graph.row_order)[: self.shape[0]], col_order=self.graph.col_order)
        options |= dict(bias=self.bias if bias is None else bias, ordered=ordered)
        options |= {} if self.units is None else {"units": self.units}
        work_list = schedule.choose(self.schedule, {}) if tiles else self.schedule
        return native.executor(work_list, self.blocks, self.graph, device=self.device, **options)

    def like_result(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Memory as `run` would return it, for compilers that only want its form; refuses what `run` would refuse."""
        if bias is not None:
            self._check_values(q, bias)
        expected = {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        device = torch.device(devices.facts(self.device).TORCH_DEVICE)
        qkv.check(q, k, v, shape=self.shape, device=device, **expected)
        if self.units is not None:
            self.units.check(q.shape[0])
        return qkv.empty(q, self.shape[0])

    def __repr__(self) -> str:
        """The pattern, the tensors and the tiles, in a line."""
        size = f"{_patterns(self.units)}{self.shape[0]} × {self.shape[1]} tokens"
        of = f"{self.heads} heads × {self.head_dim}, {str(self.dtype).removeprefix('torch.')} on {self.device}"
        runs = f"tiles {', '.join(self.blocks)}" if self.schedule.form is None else self.schedule.runs
        return f"<Plan of {size}, {of}, {runs}>"

    def summary(self) -> str:
        """Describe the pattern, the order, the tiles and the schedule with its bound.

        Returns
        -------
        str
            A few lines.
        """
        s, g = self.schedule, self.graph
        used = np.bincount(s.tile, minlength=len(s.tiles))
        tiles = ", ".join(f"{name} × {n}" for name, n in zip(s.tiles, used, strict=True) if n) or "none"
        return "\n".join(
            [
                f"pattern    {_patterns(self.units)}{self.shape[0]} × {g.n_cols}, {g.entries:,} pairs, "
                f"density {g.density:.4f}",
                f"attention  {self.heads} heads × {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"
                + (", with bias" if self.bias is not None else ""),
                f"order      {self.reorder['order']}{_reasons(self.reorder)}",
                f"work       {len(s.tile)} items: {tiles}",
                f"schedule   {s.solver}, {s.status}, bound {s.bound_us:.1f} µs, gap {100 * s.gap:.2f} %",
                f"           other tiles would gain at most {100 * s.left:.2f} % in prediction",
                f"predicted  {s.tiles_us:.1f} µs on {s.lanes} lanes",
                *_ran(s),
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as one file, which `load` reads.

        Parameters
        ----------
        path : str or Path
            File to write, such as ``window.plan``.

        Raises
        ------
        ArtifactError
            For a path that cannot be written; an existing file is unchanged.
        """
        path = arguments.path("path", path)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            graph.save(folder / "graph.npz", self.graph)
            for tile in self.blocks:
                blocks.save(folder / f"blocks-{tile}.npz", self.blocks[tile])
                profile.save(folder / f"profile-{tile}.json", self.profiles[tile])
            schedule.save(folder / "schedule.json", self.schedule)
            if self.bias is not None:
                artifacts.write_npz(
                    folder / "bias.npz", "bias", VERSION, _bias_arrays(self.bias, self.graph, self.shape[0]), {}
                )
            body = {
                "tiles": list(self.blocks),
                "scale": self.scale,
                "reorder": self.reorder,
                "bias": self.bias is not None,
            }
            if self.units is not None:
                body["units"] = asdict(self.units)
            artifacts.write_json(folder / "plan.json", KIND, VERSION, body, {"tilewright": __version__})
            with artifacts.atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
                for member in sorted(folder.iterdir()):
                    archive.write(member, member.name)


def _patterns(units):
    """What a summary says of several patterns, before their shape."""
    if units is None:
        return ""
    whose = {"head": "heads", "image": "images", "both": "heads of images"}[units.by]
    return f"{units.patterns} for {len(units.group)} {whose}, each "


def _ran(s):
    """What a summary says of torch's own attention, beside the tiles."""
    if not s.torch_us:
        return []
    times = ", ".join(f"{name} {us:.1f} µs" for name, us in s.torch_us.items())
    own = "tiles" if s.form is None else f"{s.runs} instead of the tiles, {s.predicted_us:.1f} µs"
    return [f"runs       {own}; torch's own attention: {times}"]


def _no_tensors(q, k, v, bias=None):
    """The error for a call with other things than tensors."""
    given = {"q": q, "k": k, "v": v, "bias": bias}
    name = next(name for name, x in given.items() if not isinstance(x, Tensor))
    return PatternError(f"{name}: expected a tensor, found {arguments.shown(given[name])}")


def _written(made):
    """The file of a plan, uint8 [bytes]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.plan"
        made.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _from_program(content):
    """The `Plan` of a file's bytes, which an exported program holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.plan"
        path.write_bytes(content)
        try:
            return load(path)
        except (ArtifactError, DeviceError) as error:
            # Nobody knows the path that it was written to.
            found = str(error).replace(str(path), "the plan that this program holds")
            raise (DeviceError if isinstance(error, DeviceError) else ArtifactError)(found) from error


operators.read_by(_from_program)


def _kind(device):
    """The kind of `device`. Raises `DeviceError` for a GPU other than the current one."""
    if not isinstance(device, (str, torch.device)):
        raise DeviceError(f"device: expected a name or a torch.device, found {arguments.shown(device)}")
    kind, colon, index = str(device).partition(":")
    if colon and not index.isdecimal():
        raise DeviceError(f"device: expected {kind} or {kind}:<number>, found {arguments.shown(device)}")
    current = devices.facts(kind).current()
    if index and current is not None and int(index) != current:
        raise DeviceError(
            f"expected the current GPU, {kind}:{current}, found {device}; plan and call under torch.cuda.device(…)"
        )
    return kind


def _tile_names(tiles):
    """Names of tiles, each once. Raises `ConfigError` or `TileError`."""
    if isinstance(tiles, str) or not isinstance(tiles, Sequence) or not tiles:
        raise ConfigError(f"tiles: expected names such as ('64x1', '64x64'), found {arguments.shown(tiles)}")
    return tuple(dict.fromkeys(parse_tile(name).name for name in tiles))


def _dtype_name(dtype):
    known = torch.float32, torch.float16, torch.bfloat16
    # An array is equal to nothing at once.
    if not isinstance(dtype, torch.dtype) or dtype not in known:
        raise UnknownNameError(
            "dtype", dtype if isinstance(dtype, (str, torch.dtype)) else arguments.shown(dtype), known
        )
    return str(dtype).removeprefix("torch.")


def _check_bias(bias, heads, shape, pairs):
    """Raise `PatternError` for a bias that is not one of `heads` heads and patterns of a `shape`.

    pairs: those that are allowed, as `_allowed` yields them, which alone may not be plus infinity or NaN.
    """
    table, shape = bias.table if isinstance(bias, Bias) else bias, (heads, *shape)
    if not isinstance(table, (Tensor, np.ndarray)):
        raise PatternError(f"bias: expected a tensor {shape} or a Bias with a table, found {arguments.shown(bias)}")
    table = _tensor(table)
    if table.is_nested:
        raise PatternError(f"bias: expected shape {shape}, which is (heads, N_q, N_k), found a nested tensor")
    if table.is_complex() or table.dtype == torch.bool:
        raise PatternError(f"bias: expected values that are added to scores, found {table.dtype}")
    if not isinstance(bias, Bias) and tuple(table.shape) != shape:
        raise PatternError(f"bias: expected shape {shape}, which is (heads, N_q, N_k), found {tuple(table.shape)}")
    if isinstance(bias, Bias) and (table.ndim != 2 or len(table) != heads or not table.shape[1]):
        raise PatternError(f"bias table: expected shape ({heads}, T), found {tuple(table.shape)}")
    if isinstance(bias, Bias) and not callable(bias.index):
        raise PatternError(f"bias index: expected a function of rows and columns, found {arguments.shown(bias.index)}")
    # Of a GPU's table one number is brought here.
    wrong = ~(table.detach() < torch.inf).all()
    if wrong or isinstance(bias, Bias):
        _check_pairs(bias, table.detach().cpu().float().numpy(), pairs)


def _check_pairs(bias, table, pairs):
    """`_check_bias` of the values that pairs take."""
    wrong = ~(table < np.inf).all(0)
    for rows, cols in pairs:
        if isinstance(bias, Bias):
            taken = _indices(bias, rows, cols)
            least, most = taken.min(initial=0), taken.max(initial=0)
            if least < 0 or most >= table.shape[1]:
                last = table.shape[1] - 1
                raise PatternError(f"bias index: expected 0..{last} for allowed pairs, found {least}..{most}")
            found = wrong[taken]
        else:
            found = wrong[rows, cols]
        if found.any():
            raise PatternError("bias: expected values below infinity for allowed pairs, found infinity or NaN")


def _allowed(pattern, row_order, col_order):
    """``(rows, cols)`` of the pairs of a `Graph` by the orders of its queries and keys, some queries at a time."""
    step = max(1, _INDEX_PAIRS // pattern.n_cols)
    for lo in range(0, pattern.n_rows, step):
        queries = slice(lo, lo + step)
        indptr, cols = graph.take_rows(pattern.indptr, pattern.indices, pattern.row_id[queries])
        yield np.repeat(row_order[queries], np.diff(indptr)), col_order[cols]


def _natural(ordered, n_q):
    """`_allowed` of a `Graph` in plan order, in the natural order of queries and keys; of several patterns of `n_q`
    queries, those of each."""
    return _allowed(ordered, ordered.row_order % n_q, ordered.col_order)


def _indices(bias, rows, cols):
    """int array [pairs]: where the values of pairs stand in the table of a `Bias`. Raises `PatternError`."""
    try:
        found = np.asarray(bias.index(rows, cols))
    # A user's function may raise anything.
    except Exception as error:
        raise PatternError(
            f"bias index: a call with {len(rows)} pairs failed: {' '.join(str(error).split())}"
        ) from error
    if found.dtype.kind not in "iu" or found.shape not in (rows.shape, (1,), ()):
        raise PatternError(f"bias index: expected integers of shape {rows.shape}, found {arguments.shown(found)}")
    return np.broadcast_to(found, rows.shape)


def _tensor(table):
    """A tensor as it is, an array as one on the CPU."""
    if isinstance(table, Tensor):
        return table
    try:
        return torch.as_tensor(table, device="cpu")
    except TypeError:
        raise PatternError(f"bias: expected an array of numbers, found {arguments.shown(table)}") from None


def _by_value(bias):
    """`bias` with its values as they are now, float32 in the memory of the CPU; no part of what is differentiated."""
    if bias is None:
        return None
    table = _tensor(bias.table if isinstance(bias, Bias) else bias)
    taken = table.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
    return Bias(taken, bias.index) if isinstance(bias, Bias) else taken


def _bias_content(bias, ordered, n_q):
    """What a bias consists of, for `sha256_arrays`: its values, and which of them the allowed pairs take."""
    if not isinstance(bias, Bias):
        return [] if bias is None else [bias.numpy()]
    pairs = _natural(ordered, n_q)
    return [bias.table.numpy(), *(sha256_arrays(_indices(bias, *pair).astype(np.int32)) for pair in pairs)]


def _stacked(found, ordered):
    """Patterns in the order of their union, one above the other."""
    both, n = graph.stacked(found), ordered.n_rows
    order = (np.arange(len(found))[:, None] * n + ordered.row_order).ravel()
    return both.reordered(order, ordered.col_order)


def _reorder(pattern, name, stacked):
    """``(graph in the order `name`, info)``; ``auto`` takes the cheapest of the orders, see `_order_cost`."""
    if name != "auto":
        ordered, info = reorder.apply(pattern, name)
        return stacked(ordered), info
    tried = _tried(pattern, stacked)
    costs = [_order_cost(ordered) for ordered, _ in tried]
    # Of equally cheap orders the first is taken.
    ordered, info = tried[costs.index(min(costs))]
    among = {other["order"]: cost for (_, other), cost in zip(tried, costs, strict=True)}
    return ordered, info | {"by": "work", "among": among}


def _tried(pattern, stacked):
    """``[(graph in an order, info), …]``: the orders that ``auto`` compares, ``stacked(graph)`` of each."""
    hinted = () if pattern.row_hint is None else ("window",)
    # On a grid, the two clusterings are one. Else they take long, most of it in compiled functions.
    names = (*hinted, "none", "ic") if on_grid(pattern) else (*hinted, "none", "ic", "hc")
    with ThreadPoolExecutor(2 if pattern.n_rows <= _MOST_ROWS and names[-1] == "hc" else 1) as pool:
        tried = list(pool.map(partial(reorder.apply, pattern), names))
    return [(stacked(ordered), info) for ordered, info in tried]


def _fastest(pattern, cost_of, tiled, profiled, limits, stacked):
    """``(graph, info, blocks by tile, profiles, best tile)`` in the order whose best tile alone is predicted to be
    fastest; None where no tile fits all regions.

    tiled: ``callable(graph) -> blocks by tile``, for several orders side by side; profiled: ``callable(blocks by tile)
    -> profiles``. cost_of: ``callable(graph) -> cost``; an order that costs more than `_HOPELESS` times as much as
    another is not tiled. stacked: see `_tried`.
    """
    tried = _tried(pattern, stacked)
    costs = [cost_of(ordered) for ordered, _ in tried]
    least = math.inf
    best: tuple[Any, ...] = ()
    among: dict[str, float] = {}
    first: dict[str, str] = {}
    near = [each for each, cost in zip(tried, costs, strict=True) if cost <= _HOPELESS * min(costs)]
    # The same order by another name is as fast.
    distinct = [each for each in near if first.setdefault(each[0].id, each[1]["order"]) == each[1]["order"]]
    with ThreadPoolExecutor(_at_once(pattern)) as pool:
        covers = pool.map(tiled, [ordered for ordered, _ in distinct])
        for (ordered, info), blocks_by_tile in zip(distinct, covers, strict=True):
            # In this thread, whose device it is.
            profiles = profiled(blocks_by_tile)
            among[info["order"]], alone = _best_tile(blocks_by_tile, profiles, limits)
            # Of equally fast orders the first is taken.
            if among[info["order"]] < least:
                least, best = among[info["order"]], (ordered, info, blocks_by_tile, profiles, alone)
    among = {info["order"]: among[first[ordered.id]] for ordered, info in near}
    left_out = {info["order"]: cost for (_, info), cost in zip(tried, costs, strict=True) if info["order"] not in among}
    ordered, info, *found = best
    return ordered, info | {"by": "predicted_us", "among": among, "left_out": left_out}, *found


def _at_once(pattern):
    """Orders of a pattern that are tiled at a time. Each has its blocks in memory: of many tokens, gigabytes."""
    if pattern.n_rows > _MOST_ROWS or not functions(pattern):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // _TILES)


def _best_tile(blocks_by_tile, profiles, limits):
    """``(predicted microseconds, tile)`` of the fastest schedule that has one tile for all regions; those of greedy's,
    and None, where no tile fits all regions."""
    times = {}
    for name in blocks_by_tile:
        one = {name: blocks_by_tile[name]}, {name: profiles[name]}
        with contextlib.suppress(InfeasibleError):
            times[name] = schedule.solve(*one, limits, solver="greedy").predicted_us
    if not times:
        return schedule.solve(blocks_by_tile, profiles, limits, solver="greedy").predicted_us, None
    name = min(times, key=lambda each: times[each])
    return times[name], name


def _reasons(info):
    """What to add to the name of an order: the grid that it found, and the orders that it was chosen among."""
    sides = info.get("params", {}).get("sides", [])
    among, left_out = info.get("among", {}), info.get("left_out", {})
    grid = f", grid {' × '.join(map(str, sides))}" if sides else ""
    others = [name for name in (*among, *left_out) if name != info["order"]]
    if not others:
        return f"{grid}, gathered work {info['work_fraction']:.1%} of dense"
    # What a file says of its order is not checked.
    unit = {"work": "{:.1%}", "predicted_us": "{:.1f} µs"}.get(info.get("by"))
    numbers = ", ".join(f"{name} {unit.format(value)}" for name, value in among.items()) if unit else ""
    by = {"work": " by the work of the best tile: ", "predicted_us": " by predicted time: "}.get(info.get("by"), "")
    far = ", ".join(f"{name} {value:.1%}" for name, value in left_out.items())
    return f"{grid}, chosen over {', '.join(others)}{by}{numbers}" + (f", far from {far}" if far else "")


def _order_cost(ordered, multiple=1):
    """Gathered work of the best cut of an ordered graph over dense attention.

    multiple: of rows that a group is padded to.
    """
    return best_gathered(ordered, _GROUP_ROWS, multiple)[1]


def _bias_arrays(bias, ordered, n_q):
    """A bias as arrays: dense as it is, a table with its index for every allowed pair of the pattern."""
    if not isinstance(bias, Bias):
        return {"dense": bias.numpy()}
    pair = _pairs(ordered, n_q)
    index = _indices(bias, *np.divmod(pair, ordered.n_cols)).astype(np.int32)
    return {"table": bias.table.numpy(), "pair": pair, "index": index}


def _pairs(ordered, n_q):
    """int64 [entries]: the allowed pairs in the natural order, as ``query * n_cols + key``, ascending;
    of several patterns of `n_q` queries, those of any.

    Raises `PatternError` above `graph.FULL_ENTRIES` of them.
    """
    keys = ordered.col_order[ordered.indices]
    keys = keys[np.lexsort((keys, ordered.entry_row_id))]
    row_id = ordered.row_id[np.argsort(ordered.row_order)]
    indptr, keys = graph.Graph(ordered.indptr, keys, row_id, ordered.n_cols).expand(limit=graph.FULL_ENTRIES)
    found = np.repeat(np.arange(ordered.n_rows) % n_q * ordered.n_cols, np.diff(indptr)) + keys
    return found if n_q == ordered.n_rows else np.unique(found)


def _bias_from(path, heads, ordered, n_q):
    """The bias that a file holds, checked against the pattern. Raises `ArtifactError`."""
    arrays, _ = artifacts.read_npz(path, "bias", VERSION)
    pair = _pairs(ordered, n_q)
    if "dense" in arrays:
        contents.arrays(path, arrays, dense=(np.float32, heads, n_q, ordered.n_cols))
        table, index = arrays["dense"].reshape(heads, -1), pair
    else:
        forms = {"table": (np.float32, heads, None), "pair": (np.int64, len(pair)), "index": (np.int32, len(pair))}
        contents.arrays(path, arrays, **forms)
        contents.expect(path, np.array_equal(arrays["pair"], pair), "the pairs of the pattern", "others")
        table, index = arrays["table"], arrays["index"]
        contents.within(path, "index", index, 0, table.shape[1] - 1)
    # Minus infinity forbids a pair.
    wrong = ~(table < np.inf)
    if wrong.any():
        contents.expect(path, not wrong[:, index].any(), "a bias below infinity", "infinity or NaN")
    if "dense" in arrays:
        return torch.from_numpy(arrays["dense"])

    return Bias(torch.from_numpy(table), _Lookup(pair, index, ordered.n_cols))


@dataclass(frozen=True)
class _Lookup:
    """The index of a bias that a file holds, by the pairs that are allowed: arrays, which can be pickled."""

    pair: NDArray[np.int64]
    index: NDArray[np.int32]
    n_cols: int

    def __call__(self, rows, cols):
        wanted = np.asarray(rows, np.int64) * self.n_cols + cols
        # Pairs outside the pattern are masked wherever they are met: any entry of the table will do for them.
        return self.index[np.minimum(np.searchsorted(self.pair, wanted), len(self.pair) - 1)]


class _Order(msgspec.Struct):
    order: str
    work_fraction: contents.Amount


class _Body(msgspec.Struct):
    tiles: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    scale: contents.Finite | None
    reorder: _Order
    bias: bool
    units: Units | None = None


def _load(folder, path):
    document = artifacts.read_json(folder / "plan.json", KIND, VERSION)
    body = contents.fields(folder / "plan.json", KIND, document, _Body)
    # Before they become names of files.
    for name in body.tiles:
        contents.expect(folder / "plan.json", _is_tile(name), "tiles such as 64x64 or 64x1", repr(name))
    ordered_graph = graph.load(folder / "graph.npz")
    is_ordered = ordered_graph.row_order is not None and ordered_graph.col_order is not None
    contents.expect(path, is_ordered, "an ordered graph", "none")
    if body.units is not None:
        _check_units(path, body.units, ordered_graph)
    blocks_by_tile = {name: blocks.load(folder / f"blocks-{name}.npz") for name in body.tiles}
    profiles = {name: profile.load(folder / f"profile-{name}.json") for name in body.tiles}
    found = schedule.load(folder / "schedule.json")
    one = next(iter(profiles.values()))
    check_inputs(blocks_by_tile, profiles)
    for each in blocks_by_tile.values():
        contents.expect(path, each.shape == ordered_graph.shape, f"blocks of shape {ordered_graph.shape}", each.shape)
    contents.expect(path, found.tiles == body.tiles, f"a schedule of the tiles {body.tiles}", found.tiles)
    wanted = f"a schedule for graph {ordered_graph.id}"
    contents.expect(path, found.graph_id == ordered_graph.id, wanted, found.graph_id)
    schedule.verify_inputs(found, blocks_by_tile, profiles)
    _check_device(one, path)
    blocks.verify(blocks_by_tile.values(), ordered_graph)
    schedule.verify_work(found, blocks_by_tile, profiles)
    units = body.units
    known = native.forms(ordered_graph, units)
    contents.expect(path, found.form is None or found.form in known, f"a form of {', '.join(known)}", repr(found.runs))
    n, heads = 1 if units is None else units.patterns, one.heads if units is None else units.heads
    bias = _bias_from(folder / "bias.npz", heads, ordered_graph, ordered_graph.n_rows // n) if body.bias else None
    facts = {"bias": bias, "scale": body.scale, "reorder": document["reorder"], "units": units}
    return Plan(ordered_graph, blocks_by_tile, profiles, found, **facts)


def _check_units(path, units, ordered):
    """Raise `ArtifactError` for units that are not those of several patterns one above the other in a graph."""
    n = max(units.group, default=-1) + 1
    known = sorted(set(units.group)) == list(range(n)) and units.heads > 0
    whole = len(units.group) % units.heads == 0 if units.by == "both" else True
    whole = whole and (units.by != "head" or len(units.group) == units.heads)
    contents.expect(path, known and whole and n > 1, "a pattern for each of its units", f"units {units}")
    fits = ordered.meta.get(graph.STACKED) == n and ordered.n_rows % n == 0
    contents.expect(path, fits, f"a graph of {n} patterns", f"{ordered.meta.get(graph.STACKED, 1)} in its rows")
    size = ordered.n_rows // n
    orders = ordered.row_order.reshape(n, size) - np.arange(n)[:, None] * size
    contents.expect(path, (orders == orders[0]).all(), "one order for all patterns", "several")


def _is_tile(name):
    try:
        return parse_tile(name).name == name
    except TileError:
        return False


def _check_device(measured, path):
    """Raise `DeviceError` unless the machine of a profile is here; warn where other facts than the machine differ."""
    kind = measured.device["kind"]
    try:
        here = devices.describe(kind)
    except DeviceError as error:
        raise DeviceError(
            f"{path}: planned on {measured.device.get('name')} (kind {kind}), which this machine lacks: {error}; plan "
            "the pattern again here"
        ) from error
    differing = devices.differing(measured.device, here)
    if set(differing) & set(devices.facts(kind).MACHINE):
        raise DeviceError(f"{path}: {elsewhere(measured, kind)}, or plan the pattern again here")
    if differing:
        _LOG.warning(
            "%s: %s differ from those that it was profiled with; plan again for the lowest latency",
            path,
            ", ".join(differing),
        )
