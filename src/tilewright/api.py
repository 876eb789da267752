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
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array

from tilewright import __version__, blocks, graph, profile, reorder, schedule, targets
from tilewright.blocks import work
from tilewright.blocks.cut import best_gathered
from tilewright.blocks.tiles import fitting
from tilewright.blocks.tiles import parse as parse_tile
from tilewright.core import artifacts, contents, operators
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
from tilewright.graph import Graph
from tilewright.targets import qkv, tuning
from tilewright.targets.masks import Bias
from tilewright.targets.measure import elsewhere, expected

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix
    from torch.nn.attention.flex_attention import BlockMask

    MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    Pattern: TypeAlias = Graph | sparray | spmatrix | NDArray | torch.Tensor | BlockMask | MaskMod | str | Path

KIND = "plan"
VERSION = 1

_LOG = logging.getLogger(__name__)
# Rows of the groups that orders are compared by.
_GROUP_ROWS = 64
# ASSUME: an order whose groups, padded to the smallest tile, cost so many times as much as another's is not faster. The
# cost counts masks already, and to tile an order without any locality takes longer than all else.
_HOPELESS = 1.5
# A mask_mod is evaluated for this many (query, key) pairs at a time.
_MASK_MOD_PAIRS = 1 << 24
# The index of a bias likewise.
_INDEX_PAIRS = 1 << 24

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
    bias: Bias | torch.Tensor | None = None,
    scale: float | None = None,
    shape: tuple[int, int] | None = None,
    split_keys: work.Lengths | Literal["auto"] = "auto",
    region_rows: int = 128,
    max_tile_kinds: int | None = None,
    tune: bool = False,
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> "Plan":
    """Order, tile, profile and schedule an attention pattern; return a callable `Plan`.

    pattern: which query may attend to which key, one of:
        - a scipy sparse matrix, or a boolean (or 0/1) array or tensor [N_q, N_k], on any device;
        - a `Graph`, or the path of a graph or mask file;
        - a FlexAttention ``BlockMask``;
        - a FlexAttention ``mask_mod(b, h, q_idx, kv_idx)`` with ``shape=(N_q, N_k)``, which is evaluated for each head
          and for two batch entries.
        One plan has one pattern: masks with leading dimensions [..., N_q, N_k] (batch entries, heads) are taken where
        all their slices are equal. Masks that differ by head or batch entry are not supported; make a plan for each.
    heads, head_dim, dtype, device: of the tensors that the plan will be called with; a GPU is the current one.
    reorder: an order's name, or ``auto``: of the model's own windows, where the graph declares them, ``none``, ``ic``
        and ``hc`` the one whose best tile is predicted to be fastest, on a device with a cost model, else the one with
        the least gathered work. `Plan.summary` says what was compared, and how.
    tiles: names such as ``("64x1", "64x64")``; None for the device's own, less those too large for the pattern, and the
        smallest that holds a pattern smaller than all of them.
    solver: ``highs``, ``gurobi``, ``descent`` or ``greedy``; ``highs-paper`` and ``gurobi-paper`` have the published
        objective, the longest round. Each answer but that of ``greedy`` is at least as fast in prediction as greedy's
        and as each tile alone, and a tile alone is taken unless several are surely faster (`schedule.solve`).
    bias: a `Bias`, or a tensor [H, N_q, N_k]; minus infinity forbids a pair, and a query without an allowed key gives
        zeros. Its values are copied now: those that a parameter takes later are seen by `Plan.with_bias` only.
    scale: of the scores, finite; default ``head_dim ** -0.5``.
    split_keys: longest key range of one work item, None for no limit; of several, each region gets the one that the
        solver chooses, which is never slower in prediction than with the first alone. ``auto``: that of the device.
    max_tile_kinds: most kinds of tiles that run side by side, in one round; None for the device's own.
    tune: run the solver's schedule, greedy's and those of the few tiles alone that are predicted fastest, and take the
        fastest (`targets.tuning`). It takes some seconds, and longer where kernels are compiled. `Plan.summary` says
        what was measured.

    Raises `TilewrightError` subclasses naming what was expected, what was found and what is known.
    """
    # `reorder` is the argument's published name; the family of that name is reached through its function.
    if scale is not None and not math.isfinite(scale):
        raise PatternError(f"scale: expected a finite number, found {scale}")
    kind = _kind(device)
    if max_tile_kinds is not None and max_tile_kinds < 1:
        raise ConfigError(f"max_tile_kinds: expected at least 1, found {max_tile_kinds}")
    description, defaults = targets.describe(kind), targets.facts(kind)
    limits = targets.limits(description, max_tile_kinds=max_tile_kinds)
    unordered = _as_graph(pattern, shape, heads, kind)
    if tiles is None:
        names = fitting(defaults.TILES, unordered.shape, defaults.FEWEST_ROWS)
    else:
        names = tuple(dict.fromkeys(tiles))
    options: dict[str, Any] = dict(heads=heads, head_dim=head_dim, dtype=_dtype_name(dtype))
    options["split_keys"] = defaults.SPLIT_KEYS if split_keys == "auto" else split_keys
    bias_heads = None if bias is None else heads
    fewest_rows = min((parse_tile(name).rows for name in names), default=1)

    def tiled(ordered):
        made = blocks.extract_all(ordered, [parse_tile(name) for name in names], region_rows)
        return made, expected(made, device=kind, seed=seed, bias_heads=bias_heads, **options)

    if reorder == "auto" and targets.predicts(kind):
        ordered_graph, order_info, blocks_by_tile, profiles = _fastest(
            unordered, lambda ordered: _order_cost(ordered, kind, head_dim, fewest_rows), tiled, limits
        )
    else:
        ordered_graph, order_info = _reorder(unordered, reorder, kind, head_dim)
        blocks_by_tile, profiles = tiled(ordered_graph)
    settings: dict[str, Any] = dict(solver=solver, time_limit_s=time_limit_s, seed=seed)
    found = schedule.solve(blocks_by_tile, profiles, limits, **settings, doubted=True)
    if tune:
        sizes: dict[str, Any] = dict(heads=heads, head_dim=head_dim, dtype=dtype, device=kind, seed=seed)
        finalists = tuning.finalists(found, blocks_by_tile, profiles, limits)
        found = tuning.fastest(finalists, blocks_by_tile, ordered_graph, **sizes, bias=bias, scale=scale)
        blocks_by_tile, profiles = ({name: each[name] for name in found.tiles} for each in (blocks_by_tile, profiles))
    return Plan(ordered_graph, blocks_by_tile, profiles, found, bias=bias, scale=scale, reorder=order_info)


def load(path: str | Path) -> "Plan":
    """Read a plan that `Plan.save` wrote. Its contents are checked: what they count and point to is there, and the
    blocks cover the pattern.

    A file of an older version of this package is read where its formats can be, and refused with what to do where not.

    Raises `ArtifactError` for a damaged or foreign file, `DeviceError` elsewhere than on a device of the name that it
    was profiled on. Where only versions or the number of threads differ from then it runs, with a warning: its results
    are right, its schedule may no longer be the fastest.
    """
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
    """A scheduled attention operator for one pattern. Several threads may call it, and on several GPUs of its kind.

    Attributes: `row_order`, `col_order` (int64 tensors, ``order[new] = old``), `schedule`, `blocks`, `profiles`,
    `graph` (in plan order), `heads`, `head_dim`, `dtype`, `device` (its kind, ``cpu`` or ``cuda``).
    """

    def __init__(
        self,
        ordered_graph: Graph,
        blocks_by_tile: dict[str, blocks.Blocks],
        profiles: dict[str, profile.Profile],
        work_list: schedule.Schedule,
        *,
        bias: Bias | torch.Tensor | None = None,
        scale: float | None = None,
        reorder: dict[str, Any],
    ) -> None:
        """Assemble a plan from the stages' results; `plan` and `load` are the usual ways to get one."""
        if ordered_graph.row_order is None or ordered_graph.col_order is None:
            raise PatternError("expected a graph in an order of `reorder.apply`, found one without")
        self.graph, self.blocks, self.profiles, self.schedule = ordered_graph, blocks_by_tile, profiles, work_list
        self.bias, self.scale, self.reorder = _by_value(bias), scale, reorder
        any_profile = next(iter(profiles.values()))
        self.heads, self.head_dim = any_profile.heads, any_profile.head_dim
        self.dtype, self.device = getattr(torch, any_profile.dtype), any_profile.device["kind"]
        self.row_order = torch.from_numpy(ordered_graph.row_order.astype(np.int64))
        self.col_order = torch.from_numpy(ordered_graph.col_order.astype(np.int64))
        self._prepared: dict[tuple[bool, int], Callable] = {}
        # Of the last values of a bias that a call gave: these, and the executor with them.
        self._valued: dict[tuple[bool, int], tuple[torch.Tensor, Callable]] = {}
        self._digest: str | None = None
        self._bytes: torch.Tensor | None = None
        self._name = operators.register(self)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        ordered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the pattern: q [B, H, N_q, D], k and v [B, H, N_k, D] → [B, H, N_q, D].

        ordered: the tokens stand in plan order already (``q[:, :, plan.row_order]``) and so will the result.
        bias: values in place of those that the plan was made with, of the same shape: the table [H, T] of its `Bias`,
        or dense [H, N_q, N_k]. The index, and which pairs a `Bias` is asked for, stay. They are read in this call, and
        where they changed since the last one the masks are filled again, on a GPU prepared anew.
        Plans are differentiable once, in q, k and v where their device has a backward; on a CPU in the bias, too.
        Raises `PatternError` or `DeviceError` for tensors other than planned, or that need a gradient elsewhere.
        """
        if operators.watched(q) or operators.records(q, k, v, bias):
            # Compilers hold the digest for a constant; what they compile is guarded by the name, which they read.
            # A program that is exported holds the plan's file. Dynamo, which traces no files, holds the digest alone.
            held = self._file() if operators.exporting() else None
            known = self._name and self.digest() if operators.watched(q) else self._name
            return torch.ops.tilewright.attend(q, k, v, known, ordered, held, bias)
        return self.run(q, k, v, ordered, bias)

    def with_bias(self, bias: Bias | torch.Tensor | None) -> "Plan":
        """This plan with another bias (a `Bias`, or a tensor [H, N_q, N_k]): same order, blocks and schedule.

        Its values are copied now, as `plan` does. ASSUME: the layers of a network stage share one schedule, profiled
        without their biases.
        """
        return self._maker(bias)()

    def _maker(self, bias):
        settings: dict[str, Any] = {"bias": bias, "scale": self.scale, "reorder": self.reorder}
        return partial(Plan, self.graph, self.blocks, self.profiles, self.schedule, **settings)

    def __reduce__(self):
        # Made anew: executors and names are of one process.
        return self._maker(self.bias), ()

    def __deepcopy__(self, memo):
        # A plan does not change: the copies of a module share it.
        return self

    @torch.compiler.assume_constant_result
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
        forms = (s.forms,) if s.forms else ()
        facts = self.device, self.heads, self.head_dim, self.dtype, scale, s.tiles, s.blocks_ids, s.lengths, *forms
        # As a file holds them. Where an item was predicted to run does not matter.
        work = [
            np.asarray(getattr(s, n), dtype) for n, dtype in schedule.COLUMNS.items() if n not in ("lane", "start_us")
        ]
        return sha256_arrays(repr(facts), self.graph.id, *work, *_bias_content(self.bias, self.graph))[:32]

    def _file(self):
        """What `save` writes, uint8 [bytes]: one tensor for all programs that hold it."""
        if self._bytes is None:
            # In a separate thread, where nothing traces what is written.
            with ThreadPoolExecutor(1) as apart:
                self._bytes = apart.submit(_written, self).result()
        return self._bytes

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ordered: bool, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The call behind the registered operator. The executor, prepared once for each device, checks and executes."""
        return self._executor(q, ordered, bias)(q, k, v)

    def _executor(self, q, ordered, bias=None):
        if bias is not None:
            return self._with_values(q, ordered, bias)
        key = ordered, q.get_device()
        executor = self._prepared.get(key)
        if executor is None:
            with _PREPARING, torch.cuda.device_of(q):
                executor = self._prepared.get(key)
                if executor is None:
                    executor = self._prepared[key] = self._prepare(ordered)
        return executor

    def _with_values(self, q, ordered, bias):
        """The executor for these values of the bias, the last one where they are the same."""
        self._check_values(q, bias)
        key = ordered, q.get_device()
        before, executor = self._valued.get(key, (None, None))
        if before is None or before.dtype != bias.dtype or not torch.equal(before, bias.detach()):
            # A table of its own type is compared: to a wider type, values would have to be copied in each call.
            before = bias.detach().clone()
            taken = _by_value(Bias(before, self.bias.index) if isinstance(self.bias, Bias) else before)
            with _PREPARING, torch.cuda.device_of(q):
                filled = getattr(executor, "with_bias", None)
                if filled is None:
                    executor = self._prepare(ordered, taken)
                else:
                    executor = filled(taken.table if isinstance(taken, Bias) else taken.flatten(1))
            # At once: other threads may call with other values.
            self._valued[key] = before, executor
        return executor

    def _check_values(self, q, bias):
        """Raise `PatternError` for values of another form than those that the plan was made with."""
        own = self.bias.table if isinstance(self.bias, Bias) else self.bias
        if own is None or bias.shape != own.shape or not bias.is_floating_point() or bias.device != q.device:
            planned = "none" if own is None else f"a float tensor {list(own.shape)} on {q.device}"
            raise PatternError(
                f"bias: expected {planned}, as planned; found {bias.dtype} {list(bias.shape)} on {bias.device}"
            )

    def gradients(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        ordered: bool,
        bias: torch.Tensor | None = None,
        of_bias: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """The call behind the backward of the registered operator: those of q, k, v, and `of_bias`, contiguous."""
        self.check_backward(of_bias)
        module = targets.backward(self.device)
        differentiated = module.gradients_with_bias if of_bias else module.gradients
        with torch.no_grad():
            found = differentiated(self._executor(q, ordered, bias), q, k, v, out, grad)
            if of_bias and bias is not None:
                found = (*found[:3], found[3].view(bias.shape).to(bias.dtype))
        return tuple(x.contiguous() for x in found)

    def check_backward(self, of_bias: bool = False) -> None:
        """Raise `PatternError` where this plan's device has no backward, or none `of_bias`."""
        if not targets.differentiates(self.device):
            raise PatternError(f"plans for {self.device} have no backward: call them under torch.no_grad()")
        if of_bias and not targets.differentiates_bias(self.device):
            raise PatternError(
                f"plans for {self.device} have no gradient of a bias: freeze it by requires_grad_(False), or call them "
                "under torch.no_grad()"
            )

    def _prepare(self, ordered, bias=None):
        return targets.executor(self.device).prepare(
            self.schedule,
            self.blocks,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            row_order=self.graph.row_order,
            col_order=self.graph.col_order,
            bias=self.bias if bias is None else bias,
            scale=self.scale,
            ordered=ordered,
        )

    def like_result(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Memory as `run` would return it, for compilers that only want its form; refuses what `run` would refuse."""
        if bias is not None:
            self._check_values(q, bias)
        expected = {"heads": self.heads, "head_dim": self.head_dim, "dtype": self.dtype}
        device = torch.device(targets.facts(self.device).TORCH_DEVICE)
        qkv.check(q, k, v, shape=self.graph.shape, device=device, **expected)
        return qkv.empty(q, self.graph.n_rows)

    def summary(self) -> str:
        """A few lines for people: the pattern, the order, the tiles, the schedule and its proof."""
        s, g = self.schedule, self.graph
        used = np.bincount(s.tile, minlength=len(s.tiles))
        tiles = ", ".join(f"{name} × {n}" for name, n in zip(s.tiles, used, strict=True) if n) or "none"
        return "\n".join(
            [
                f"pattern    {g.n_rows} × {g.n_cols}, {g.entries:,} pairs, density {g.density:.4f}",
                f"attention  {self.heads} heads × {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"
                + (", with bias" if self.bias is not None else ""),
                f"order      {self.reorder['order']}, gathered work {self.reorder['work_fraction']:.4f} of dense"
                + _reasons(self.reorder),
                f"work       {len(s.tile)} items: {tiles}",
                f"schedule   {s.solver}, {s.status}, bound {s.bound_us:.1f} µs, gap {100 * s.gap:.2f} %",
                f"left       at most {100 * s.left:.2f} % to gain by other tiles, or splits at {_lengths(s)} keys",
                f"predicted  {s.predicted_us:.1f} µs on {s.lanes} lanes",
                *_tuned(s),
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as one file: the stages' own files in a zip archive, renamed into place when complete."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            graph.save(folder / "graph.npz", self.graph)
            for tile in self.blocks:
                blocks.save(folder / f"blocks-{tile}.npz", self.blocks[tile])
                profile.save(folder / f"profile-{tile}.json", self.profiles[tile])
            schedule.save(folder / "schedule.json", self.schedule)
            if self.bias is not None:
                artifacts.write_npz(folder / "bias.npz", "bias", VERSION, _bias_arrays(self.bias, self.graph), {})
            body = {
                "tiles": list(self.blocks),
                "scale": self.scale,
                "reorder": self.reorder,
                "bias": self.bias is not None,
            }
            artifacts.write_json(folder / "plan.json", KIND, VERSION, body, {"tilewright": __version__})
            with artifacts.atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
                for member in sorted(folder.iterdir()):
                    archive.write(member, member.name)


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


def _tuned(found):
    """A line for people of what was measured, a list; empty where nothing was."""
    timed = sorted((t for t in found.trials if t.p50_us is not None), key=lambda trial: trial.p50_us)
    times = ", ".join(f"{'+'.join(trial.tiles)} {trial.solver} {trial.p50_us:.1f} µs" for trial in timed)
    return [f"tuned      in {found.tuned_s:.1f} s: {times}"] if found.trials else []


def _lengths(found):
    return ", ".join("no number of" if length is None else str(length) for length in found.lengths)


def _kind(device):
    """The kind of `device`. Raises `DeviceError` for a GPU other than the current one."""
    kind, _, index = str(device).partition(":")
    current = targets.facts(kind).current()
    if index and current is not None and int(index) != current:
        raise DeviceError(
            f"expected the current GPU, {kind}:{current}, found {device}; plan and call under torch.cuda.device(…)"
        )
    return kind


def _dtype_name(dtype):
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnknownNameError("dtype", str(dtype), ("torch.float32", "torch.float16", "torch.bfloat16"))
    return str(dtype).removeprefix("torch.")


def _as_graph(pattern, shape, heads, kind):
    """The `Graph` of a pattern of any form that `plan` takes. kind: where a mask_mod may keep its tensors."""
    if isinstance(pattern, Graph):
        return pattern
    if isinstance(pattern, (str, Path)):
        return graph.read_mask(pattern)
    if _is_block_mask(pattern):
        return _from_block_mask(pattern, shape)
    if isinstance(pattern, torch.Tensor):
        return graph.from_pattern(_host_array(pattern))
    if callable(pattern):
        if shape is None:
            raise PatternError("a mask_mod needs its shape: plan(mask_mod, shape=(N_q, N_k), …)")
        n_q, n_k = shape
        return _from_mask_mod(pattern, n_q, n_k, heads, kind)
    return graph.from_pattern(pattern)


def _is_block_mask(pattern):
    # Who has one has loaded its module, which takes long to load.
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(pattern, flex.BlockMask)


def _host_array(mask):
    """A mask tensor as an array that `graph.from_pattern` takes: dense, or COO where the tensor is sparse."""
    mask = mask.detach().cpu()
    if mask.dtype == torch.bfloat16:
        mask = mask.float()
    if mask.layout == torch.strided:
        return mask.numpy()
    if mask.ndim != 2:
        raise PatternError(f"expected a sparse mask of two dimensions, found shape {tuple(mask.shape)}")
    coo = mask.to_sparse_coo().coalesce()
    return coo_array((coo.values().numpy(), tuple(coo.indices().numpy())), shape=tuple(mask.shape))


def _from_mask_mod(mask_mod, n_q, n_k, heads, kind):
    """Evaluate ``mask_mod(b, h, q, k)`` for each head, and for a second batch entry.

    On the CPU, or, where that raises since its tensors lie on the GPU, on the GPU that the plan is for.
    """
    entries = [(0, 0), (1, 0), *((0, h) for h in range(1, heads))]
    try:
        return _evaluate(mask_mod, n_q, n_k, entries, "cpu")
    except PatternError as error:
        facts = targets.facts(kind)
        if not facts.CUDA or not isinstance(error.__cause__, RuntimeError):
            raise
        return _evaluate(mask_mod, n_q, n_k, entries, facts.TORCH_DEVICE)


def _from_block_mask(mask, shape):
    """The pattern of a FlexAttention ``BlockMask``: its full blocks, and its mask_mod in its other blocks."""
    n_q, n_k = mask.seq_lengths
    if shape is not None and tuple(shape) != (n_q, n_k):
        raise PatternError(f"shape: expected that of the BlockMask, {(n_q, n_k)}, found {tuple(shape)}")
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    rows, keys = mask.BLOCK_SIZE
    # One of 4 dimensions names the batch entries and heads that it is for; those of fewer are for all.
    partial, full = (x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (partial, full))

    def allowed(b, h, q_idx, kv_idx):
        at = b, h, q_idx // rows, kv_idx // keys
        return full[at] | (partial[at] & mask.mask_mod(b, h, q_idx, kv_idx))

    entries = [(b, h) for b in range(partial.shape[0]) for h in range(partial.shape[1])]
    return _evaluate(allowed, n_q, n_k, entries, partial.device)


def _listed(counts, indices):
    """bool [..., rows, columns] of blocks: the first `counts` [..., rows] of `indices` [..., rows, columns]."""
    n = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(n, dtype=torch.int32).scatter_add_(-1, indices.long(), n.int()) > 0


def _evaluate(mask_mod, n_q, n_k, entries, device):
    """The pattern of ``mask_mod(b, h, q, k)``, evaluated over all pairs, some rows at a time, for each of `entries`.

    entries: ``(batch entry, head)``. Raises `PatternError` where two of them differ, or mask_mod raises an error.
    """
    keys = torch.arange(n_k, device=device)
    step = max(1, _MASK_MOD_PAIRS // n_k)
    counts, indices = [], []
    for lo in range(0, n_q, step):
        queries = torch.arange(lo, min(lo + step, n_q), device=device)[:, None]

        def at(b, h, queries=queries):
            b_and_h = torch.tensor((b, h), device=device)
            try:
                found = torch.as_tensor(mask_mod(*b_and_h, queries, keys))
            # A user's function may raise anything.
            except Exception as error:
                raise PatternError(f"mask_mod: evaluated on {device} for batch entry {b}, head {h}: {error}") from error
            return found.cpu().expand(len(queries), n_k)

        allowed = at(*entries[0])
        for b, h in entries[1:]:
            if not torch.equal(at(b, h), allowed):
                raise PatternError(
                    "mask_mod: expected one pattern for every head and batch entry, found others at batch entry 0, "
                    f"head 0 and at batch entry {b}, head {h}; make a plan for each"
                )
        counts.append(allowed.sum(1))
        indices.append(allowed.nonzero()[:, 1].to(torch.int32))
    indptr = np.concatenate(([0], torch.cat(counts).cumsum(0).numpy()))
    return graph.from_csr(indptr, torch.cat(indices).numpy(), (n_q, n_k))


def _by_value(bias):
    """`bias` with its values as they are now, float32 in the memory of the CPU; no part of what is differentiated."""
    if bias is None:
        return None
    table = bias.table if isinstance(bias, Bias) else torch.as_tensor(bias)
    taken = table.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
    return Bias(taken, bias.index) if isinstance(bias, Bias) else taken


def _bias_content(bias, ordered):
    """What a bias consists of, for `sha256_arrays`: its values, and which of them the allowed pairs take."""
    if not isinstance(bias, Bias):
        return [] if bias is None else [bias.numpy()]
    content, step = [bias.table.numpy()], max(1, _INDEX_PAIRS // ordered.n_cols)
    for lo in range(0, ordered.n_rows, step):
        queries = slice(lo, lo + step)
        indptr, cols = graph.take_rows(ordered.indptr, ordered.indices, ordered.row_id[queries])
        rows = np.repeat(ordered.row_order[queries], np.diff(indptr))
        content.append(sha256_arrays(np.asarray(bias.index(rows, ordered.col_order[cols]), np.int32)))
    return content


def _reorder(pattern, name, kind, head_dim):
    """``(graph in the order `name`, info)``; ``auto`` takes the cheapest of the orders, see `_order_cost`."""
    if name != "auto":
        return reorder.apply(pattern, name)
    tried = _tried(pattern)
    costs = [_order_cost(ordered, kind, head_dim) for ordered, _ in tried]
    # Of equally cheap orders the first is taken.
    ordered, info = tried[costs.index(min(costs))]
    among = {other["order"]: cost for (_, other), cost in zip(tried, costs, strict=True)}
    return ordered, info | {"by": "work", "among": among}


def _tried(pattern):
    """``[(graph in an order, info), …]``: the orders that ``auto`` compares."""
    tried: list[tuple[Graph, dict[str, Any]]] = []
    for candidate in ("window", "none", "ic", "hc"):
        # On a grid, the two clusterings are one.
        on_grid = any("grid" in info["params"] for _, info in tried)
        if (candidate == "window" and pattern.row_hint is None) or (candidate == "hc" and on_grid):
            continue
        tried.append(reorder.apply(pattern, candidate))
    return tried


def _fastest(pattern, cost_of, tiled, limits):
    """``(graph, info, blocks by tile, profiles)`` in the order whose best tile alone is predicted to be fastest.

    tiled: ``callable(graph) -> (blocks by tile, profiles)``. cost_of: ``callable(graph) -> cost``; an order that costs
    more than `_HOPELESS` times as much as another is not tiled.
    """
    tried = _tried(pattern)
    costs = [cost_of(ordered) for ordered, _ in tried]
    least = math.inf
    best: tuple[Any, ...] = ()
    among: dict[str, float] = {}
    first: dict[str, str] = {}
    for ordered, info in (each for each, cost in zip(tried, costs, strict=True) if cost <= _HOPELESS * min(costs)):
        name = info["order"]
        # The same order by another name is as fast.
        if first.setdefault(ordered.id, name) != name:
            among[name] = among[first[ordered.id]]
            continue
        blocks_by_tile, profiles = tiled(ordered)
        among[name] = _best_tile_us(blocks_by_tile, profiles, limits)
        # Of equally fast orders the first is taken.
        if among[name] < least:
            least, best = among[name], (ordered, info, blocks_by_tile, profiles)
    left_out = {info["order"]: cost for (_, info), cost in zip(tried, costs, strict=True) if info["order"] not in among}
    ordered, info, blocks_by_tile, profiles = best
    return ordered, info | {"by": "predicted_us", "among": among, "left_out": left_out}, blocks_by_tile, profiles


def _best_tile_us(blocks_by_tile, profiles, limits):
    """Predicted microseconds of the best schedule that has one tile for all regions."""
    times = []
    for name in blocks_by_tile:
        one = {name: blocks_by_tile[name]}, {name: profiles[name]}
        # A tile may not fit some region.
        with contextlib.suppress(InfeasibleError):
            times.append(schedule.solve(*one, limits, solver="greedy").predicted_us)
    return min(times) if times else schedule.solve(blocks_by_tile, profiles, limits, solver="greedy").predicted_us


def _reasons(info):
    """What to add to the name of an order: the grid that it found, and the orders that it was chosen among."""
    sides = info.get("params", {}).get("sides", [])
    among, left_out = info.get("among", {}), info.get("left_out", {})
    grid = f", grid {' × '.join(map(str, sides))}" if sides else ""
    others = [name for name in (*among, *left_out) if name != info["order"]]
    if not others:
        return grid
    # Plans of earlier versions do not say what was compared.
    unit = {"work": "{:.4f} of dense", "predicted_us": "{:.1f} µs"}.get(info.get("by"))
    numbers = ", ".join(f"{name} {unit.format(value)}" for name, value in among.items()) if unit else ""
    by = {"work": " by gathered work and masks: ", "predicted_us": " by predicted time: "}.get(info.get("by"), "")
    far = ", ".join(f"{name} {value:.4f} of dense" for name, value in left_out.items())
    return f"{grid}, chosen over {', '.join(others)}{by}{numbers}" + (f", far from {far}" if far else "")


def _order_cost(ordered, kind, head_dim, multiple=1):
    """Gathered work of the best cut of an ordered graph over dense attention, times what its masks cost.

    multiple: of rows that a group is padded to.
    """
    row_ptr, work = best_gathered(ordered, _GROUP_ROWS, multiple)
    return work * targets.mask_cost(kind, ordered, row_ptr, head_dim)


def _bias_arrays(bias, ordered):
    """A bias as arrays: dense as it is, a table with its index for every allowed pair of the pattern."""
    if not isinstance(bias, Bias):
        return {"dense": bias.numpy()}
    pair = _pairs(ordered)
    index = np.asarray(bias.index(*np.divmod(pair, ordered.n_cols)), np.int32)
    return {"table": bias.table.numpy(), "pair": pair, "index": index}


def _pairs(ordered):
    """int64 [entries]: the allowed pairs in the natural order, as ``query * n_cols + key``, ascending.

    Raises `PatternError` above `graph.FULL_ENTRIES` of them.
    """
    keys = ordered.col_order[ordered.indices]
    keys = keys[np.lexsort((keys, ordered.entry_row_id))]
    row_id = ordered.row_id[np.argsort(ordered.row_order)]
    indptr, keys = graph.Graph(ordered.indptr, keys, row_id, ordered.n_cols).expand(limit=graph.FULL_ENTRIES)
    return np.repeat(np.arange(ordered.n_rows) * ordered.n_cols, np.diff(indptr)) + keys


def _bias_from(path, heads, ordered):
    """The bias that a file holds, checked against the pattern. Raises `ArtifactError`."""
    arrays, _ = artifacts.read_npz(path, "bias", VERSION)
    pair = _pairs(ordered)
    if "dense" in arrays:
        contents.arrays(path, arrays, dense=(np.float32, heads, *ordered.shape))
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

    def lookup(rows, cols):
        wanted = np.asarray(rows, np.int64) * ordered.n_cols + cols
        # Pairs outside the pattern are masked wherever they are met: any entry of the table will do for them.
        return index[np.minimum(np.searchsorted(pair, wanted), len(pair) - 1)]

    return Bias(torch.from_numpy(table), lookup)


class _Order(msgspec.Struct):
    order: str
    work_fraction: contents.Amount


class _Body(msgspec.Struct):
    tiles: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    scale: contents.Finite | None
    reorder: _Order
    bias: bool


def _load(folder, path):
    document = artifacts.read_json(folder / "plan.json", KIND, VERSION)
    body = contents.fields(folder / "plan.json", KIND, document, _Body)
    # Before they become names of files.
    for name in body.tiles:
        contents.expect(folder / "plan.json", _is_tile(name), "tiles such as 64x64 or 64x1", repr(name))
    ordered_graph = graph.load(folder / "graph.npz")
    is_ordered = ordered_graph.row_order is not None and ordered_graph.col_order is not None
    contents.expect(path, is_ordered, "an ordered graph", "none")
    blocks_by_tile = {name: blocks.load(folder / f"blocks-{name}.npz") for name in body.tiles}
    profiles = {name: profile.load(folder / f"profile-{name}.json") for name in body.tiles}
    found = schedule.load(folder / "schedule.json")
    one = next(iter(profiles.values()))
    for name, each in blocks_by_tile.items():
        whose = profiles[name]
        contents.expect(path, each.tile.name == whose.tile == name, f"blocks and profile of tile {name}", "others")
        contents.expect(path, each.shape == ordered_graph.shape, f"blocks of shape {ordered_graph.shape}", each.shape)
        for what in ("heads", "head_dim", "dtype", "device_id"):
            wanted, have = getattr(one, what), getattr(whose, what)
            contents.expect(path, have == wanted, f"profiles of {what} {wanted}", have)
        contents.expect(path, whose.split_keys == found.split_keys, f"split_keys {found.split_keys}", whose.split_keys)
    contents.expect(path, found.tiles == body.tiles, f"a schedule of the tiles {body.tiles}", found.tiles)
    wanted = f"a schedule for graph {ordered_graph.id}"
    contents.expect(path, found.graph_id == ordered_graph.id, wanted, found.graph_id)
    schedule.verify_inputs(found, blocks_by_tile, profiles)
    _check_device(one, path)
    blocks.verify(blocks_by_tile.values(), ordered_graph)
    schedule.verify_work(found, blocks_by_tile, profiles)
    bias = _bias_from(folder / "bias.npz", one.heads, ordered_graph) if body.bias else None
    facts = {"bias": bias, "scale": body.scale, "reorder": document["reorder"]}
    return Plan(ordered_graph, blocks_by_tile, profiles, found, **facts)


def _is_tile(name):
    try:
        return parse_tile(name).name == name
    except TileError:
        return False


def _check_device(measured, path):
    """Raise `DeviceError` unless the machine of a profile is here; warn where other facts than the machine differ."""
    kind = measured.device["kind"]
    try:
        here = targets.describe(kind)
    except DeviceError as error:
        raise DeviceError(
            f"{path}: planned on {measured.device.get('name')} (kind {kind}), which is not here: {error}; plan the "
            "pattern again for a device that is"
        ) from error
    differing = targets.differing(measured.device, here)
    if set(differing) & set(targets.facts(kind).MACHINE):
        raise DeviceError(f"{path}: {elsewhere(measured, kind)}, or plan the pattern again here")
    if differing:
        _LOG.warning("%s: %s differ from when it was profiled; plan again for the fastest", path, ", ".join(differing))
