"""The attention pattern of one layer as a sparse graph (written by T1, reordered by T2).

A `Graph` says which query (row) may see which key (column). Rows that are equal are held once: `indptr`/`indices` list
the keys of each *distinct* row and `row_id` names the distinct row of every query. Patterns of windowed models have
few distinct rows, which is what makes images of thousands of pixels a side possible.

A reordered graph holds the pattern in its new order together with `row_order` and `col_order`, both with the convention
``order[new] = old`` of `scipy.sparse.csgraph`.
"""

import itertools
import math
import os
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewright.core import artifacts, contents
from tilewright.core.errors import ArtifactError, PatternError
from tilewright.core.provenance import sha256_arrays

if TYPE_CHECKING:
    from scipy.sparse import csr_array

KIND = "graph"
VERSION = 1

# Above this many entries a file holds distinct rows instead of the full pattern, and says so (``storage: classes``).
# 40 M entries are 160 MB of int32 column ids.
FULL_ENTRIES = 40_000_000
# From so many keys a row on, rows are renamed one by one: otherwise 6 * 10^7 keys of 10,766 rows take 4.5 s, not 1 s.
_LONG = 1 << 10
# The fact in `Graph.meta` of a graph that holds several patterns, one above the other: how many.
STACKED = "stacked"


@dataclass(frozen=True, eq=False)
class Graph:
    """A rectangular attention pattern with its distinct rows held once.

    Fields (N_q queries, N_k keys, R distinct rows):
        indptr: int64 [R+1]; indices: int32, the sorted keys of each distinct row.
        row_id: int32 [N_q], the distinct row of each query.
        n_cols: N_k.
        meta: JSON-able facts: ``model``, ``heads``, ``head_dim``, ``grid`` and whatever the model adds.
        row_hint, col_hint: int64 [N_q], [N_k] or None: the model's own window (or spatial tile) of each token; tokens
            that sort together under it belong together. Used by the ``window`` order only.
        row_order, col_order: int32 or None: for a reordered graph, ``order[new] = old`` against the graph it came from.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    row_id: NDArray[np.int32]
    n_cols: int
    meta: dict[str, Any] = field(default_factory=dict)
    row_hint: NDArray[np.integer] | None = None
    col_hint: NDArray[np.integer] | None = None
    row_order: NDArray[np.int32] | None = None
    col_order: NDArray[np.int32] | None = None

    @property
    def n_rows(self) -> int:
        """Number of queries."""
        return len(self.row_id)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N_q, N_k)``."""
        return self.n_rows, self.n_cols

    @property
    def bounds(self) -> NDArray[np.int64] | None:
        """int64 [G+1]: the first row of each of the G patterns that stand one above the other; None for one."""
        n = self.meta.get(STACKED, 1)
        return None if n == 1 else np.arange(n + 1) * (self.n_rows // n)

    @property
    def n_distinct(self) -> int:
        """Number of distinct rows."""
        return len(self.indptr) - 1

    @property
    def entry_row_id(self) -> NDArray[np.int64]:
        """int64 [entries of the distinct rows]: the distinct row that each of `indices` belongs to."""
        return np.repeat(np.arange(self.n_distinct), np.diff(self.indptr))

    @cached_property
    def row_degree(self) -> NDArray[np.int64]:
        """int64 [N_q]: keys that each query sees."""
        return np.diff(self.indptr)[self.row_id]

    @cached_property
    def entries(self) -> int:
        """Allowed (query, key) pairs."""
        return int(self.row_degree.sum())

    @property
    def density(self) -> float:
        """Allowed pairs over all pairs."""
        return self.entries / (self.n_rows * self.n_cols)

    @cached_property
    def id(self) -> str:
        """Digest of the pattern and, for a reordered graph, of its orders."""
        orders = [o for o in (self.row_order, self.col_order) if o is not None]
        return sha256_arrays(np.asarray(self.shape, np.int64), self.indptr, self.indices, self.row_id, *orders)[:16]

    def row(self, query: int) -> NDArray[np.int32]:
        """Sorted keys of one query."""
        r = self.row_id[query]
        return self.indices[self.indptr[r] : self.indptr[r + 1]]

    def expand(self, limit: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The full pattern as canonical CSR ``(indptr int64 [N_q+1], indices int32)``.

        Raises `PatternError` above `limit` entries, when given.
        """
        if limit is not None and self.entries > limit:
            raise PatternError(f"the full pattern has {self.entries:,} entries; expected at most {limit:,} here")
        return take_rows(self.indptr, self.indices, self.row_id)

    def to_csr(self) -> "csr_array":
        """The full pattern as a `scipy.sparse.csr_array` of booleans."""
        from scipy.sparse import csr_array

        indptr, indices = self.expand()
        return csr_array((np.ones(len(indices), bool), indices, indptr), shape=self.shape)

    def to_dense(self) -> NDArray[np.bool_]:
        """The full pattern as a bool array [N_q, N_k]; for small graphs."""
        dense = np.zeros((self.n_distinct, self.n_cols), bool)
        dense[self.entry_row_id, self.indices] = True
        return dense[self.row_id]

    def reordered(self, row_order: ArrayLike, col_order: ArrayLike) -> "Graph":
        """This pattern with queries and keys put in a new order (``order[new] = old``); distinct rows stay shared.

        Raises `PatternError` when an order is no permutation, or this graph is reordered already.
        """
        if self.row_order is not None:
            raise PatternError("expected a graph in its natural order, found one that is reordered already")
        rows = _permutation("row_order", row_order, self.n_rows)
        cols = _permutation("col_order", col_order, self.n_cols)
        natural = np.array_equal(cols, np.arange(self.n_cols))
        return replace(
            self,
            indices=self.indices.astype(np.int32) if natural else self._renamed(cols),
            row_id=self.row_id[rows],
            row_hint=None if self.row_hint is None else self.row_hint[rows],
            col_hint=None if self.col_hint is None else self.col_hint[cols],
            row_order=rows,
            col_order=cols,
        )

    def _renamed(self, cols):
        """`indices` where the keys come in the order `cols`, ascending in each row."""
        from scipy.sparse import csr_array

        new_col = np.empty(self.n_cols, np.int32)
        new_col[cols] = np.arange(self.n_cols, dtype=np.int32)
        if len(self.indices) > _LONG * self.n_distinct:
            return self._renamed_by_row(new_col)
        pattern = csr_array(
            (np.ones(len(self.indices), bool), new_col[self.indices], self.indptr), shape=(self.n_distinct, self.n_cols)
        )
        # Transposing sorts, in linear time; twice gives the rows, their keys ascending.
        return pattern.tocsc().tocsr().indices.astype(np.int32)

    def _renamed_by_row(self, new_col):
        """`_renamed` row by row, on all processors: it takes no memory but that of the result."""
        found = np.empty(len(self.indices), np.int32)
        bounds = self.indptr.tolist()

        def fill(rows):
            for lo, hi in itertools.pairwise(bounds[rows.start : rows.stop + 1]):
                np.take(new_col, self.indices[lo:hi], out=found[lo:hi], mode="clip")
                found[lo:hi].sort()

        workers = len(os.sched_getaffinity(0))
        step = -(-self.n_distinct // (4 * workers))
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(fill, (slice(lo, lo + step) for lo in range(0, self.n_distinct, step))))
        return found


def _permutation(name, order, size):
    order = np.asarray(order)
    if order.shape != (size,) or not np.array_equal(np.sort(order), np.arange(size)):
        raise PatternError(f"{name}: expected a permutation of 0..{size - 1}, found an array of shape {order.shape}")
    return order.astype(np.int32)


def take_rows(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], rows: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """CSR arrays ``(indptr int64 [R+1], indices)`` of the chosen `rows` (int [R]; a row may be named often)."""
    degrees = np.diff(indptr)[rows]
    taken = np.concatenate(([0], np.cumsum(degrees)))
    offset = np.arange(taken[-1]) - np.repeat(taken[:-1] - indptr[rows], degrees)
    return taken, indices[offset]


def from_csr(
    indptr: ArrayLike,
    indices: ArrayLike,
    shape: tuple[int, int],
    *,
    meta: dict[str, Any] | None = None,
    row_hint: NDArray[np.integer] | None = None,
    col_hint: NDArray[np.integer] | None = None,
) -> Graph:
    """Build a `Graph` from full CSR arrays, collapsing equal rows exactly.

    The indices of a row may come unsorted; they are sorted. Raises `PatternError` for indices out of range, repeated
    keys in a row, an `indptr` that does not fit, an empty shape or a pattern without entries.
    """
    n_rows, n_cols = map(int, shape)
    if n_rows < 1 or n_cols < 1:
        raise PatternError(f"expected at least one query and one key, found shape {n_rows} x {n_cols}")
    indptr = np.asarray(indptr, np.int64)
    indices = np.asarray(indices)
    if indptr.shape != (n_rows + 1,) or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise PatternError(f"indptr does not describe {n_rows} rows of {len(indices)} indices")
    if not len(indices):
        raise PatternError(f"the pattern {n_rows} x {n_cols} has no entry: no query sees any key")
    if indices.min() < 0 or indices.max() >= n_cols:
        raise PatternError(f"column indices must lie in 0..{n_cols - 1}, found {indices.min()}..{indices.max()}")
    indices = indices.astype(np.int32)
    owner = np.repeat(np.arange(n_rows, dtype=np.int64), np.diff(indptr))
    # A row is in order when no index falls below its predecessor of the same row.
    step, same = np.diff(indices), np.diff(owner) == 0
    if (step[same] < 0).any():
        indices = indices[np.lexsort((indices, owner))]
        step = np.diff(indices)
    if (step[same] == 0).any():
        raise PatternError(f"row {owner[1:][same & (step == 0)][0]} names a key twice")
    del owner, step, same
    first, row_id = _collapse(indptr, indices)
    distinct, keys = take_rows(indptr, indices, first)
    return Graph(distinct, keys, row_id, n_cols, dict(meta or {}), row_hint, col_hint)


def from_distinct_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    row_id: NDArray[np.int32],
    n_cols: int,
    *,
    meta: dict[str, Any] | None = None,
    row_hint: NDArray[np.integer] | None = None,
    col_hint: NDArray[np.integer] | None = None,
) -> Graph:
    """Build a `Graph` from the rows that the queries of a model share. Rows that are equal are merged.

    indptr: int64 [R+1]; indices: int32, ascending in each row; row_id: int32 [N_q], the row of each query. Rows are
    numbered by first appearance. These are not checked.
    """
    first, merged = _collapse(indptr, indices)
    distinct, keys = take_rows(indptr, indices, first)
    return Graph(distinct, keys, merged[row_id], n_cols, dict(meta or {}), row_hint, col_hint)


def stacked(patterns: list[Graph]) -> Graph:
    """Patterns of one shape, one above the other, as one graph; rows that are equal in several are held once.

    Raises `PatternError` for patterns of unequal shapes, or that are reordered.
    """
    first = patterns[0]
    for number, other in enumerate(patterns):
        if other.shape != first.shape:
            raise PatternError(
                f"patterns: expected the shape of the first, {first.shape}, found {other.shape} at {number}"
            )
        if other.row_order is not None:
            raise PatternError(f"patterns: expected graphs in their natural order, found one reordered at {number}")
    sizes = np.cumsum([0] + [len(other.indices) for other in patterns])
    numbers = np.cumsum([0] + [other.n_distinct for other in patterns])
    indptr = [other.indptr[1:] + size for other, size in zip(patterns, sizes[:-1], strict=True)]
    row_id = [other.row_id + number for other, number in zip(patterns, numbers[:-1], strict=True)]
    return from_distinct_rows(
        np.concatenate([[0], *indptr]),
        np.concatenate([other.indices for other in patterns]),
        np.concatenate(row_id),
        first.n_cols,
        meta=first.meta | {STACKED: len(patterns)},
    )


def union(patterns: list[Graph]) -> Graph:
    """The pairs that any of `patterns`, of one shape, allows; with the hints that all have in common."""
    total = patterns[0].to_csr()
    for other in patterns[1:]:
        total = total + other.to_csr()
    found = from_pattern(total, meta=patterns[0].meta)

    def common(name):
        first = getattr(patterns[0], name)
        same = first is not None and all(
            getattr(x, name) is not None and np.array_equal(getattr(x, name), first) for x in patterns
        )
        return first if same else None

    return replace(found, row_hint=common("row_hint"), col_hint=common("col_hint"))


def _collapse(indptr, indices):
    """``(first, row_id)``: where each distinct row appears first, in that order, and the distinct row of every row."""
    seen: dict[bytes, int] = {}
    first: list[int] = []
    row_id = np.empty(len(indptr) - 1, np.int32)
    view = np.ascontiguousarray(indices).data.cast("B")
    for row, (lo, hi) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        # bytes compare by content, so that equal keys of the dict are equal rows.
        key = bytes(view[4 * lo : 4 * hi])
        known = seen.setdefault(key, len(first))
        if known == len(first):
            first.append(row)
        row_id[row] = known
    return np.asarray(first, np.int64), row_id


def from_pattern(pattern: Any, **keywords: Any) -> Graph:
    """Build a `Graph` from a matrix.

    Parameters
    ----------
    pattern : scipy sparse matrix or array
        Boolean or 0/1, [N_q, N_k]. Stored zeros of a sparse matrix are no entries. An array may have leading
        dimensions, such as batch entries and heads, if all its slices [N_q, N_k] are equal.
    **keywords
        ``meta``, ``row_hint`` and ``col_hint``, see `Graph`.

    Returns
    -------
    Graph

    Raises
    ------
    PatternError
        For other shapes or values, and for a pattern without entries.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright import graph
    >>> found = graph.from_pattern(np.tri(64, dtype=bool))
    >>> found.shape, found.entries
    ((64, 64), 2080)
    """
    import scipy.sparse as sp

    if sp.issparse(pattern):
        csr = pattern.tocsr()
        data = np.asarray(csr.data)
        _check_binary(data)
        indptr, indices = csr.indptr, csr.indices
        if not (data != 0).all():
            owner = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))[data != 0]
            indices = csr.indices[data != 0]
            indptr = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=csr.shape[0]))))
        return from_csr(indptr, indices, csr.shape, **keywords)
    dense = _one_slice(np.asarray(pattern))
    _check_binary(dense)
    rows, cols = np.nonzero(dense)
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=dense.shape[0]))))
    return from_csr(indptr, cols, dense.shape, **keywords)


def _one_slice(dense):
    """The slice [N_q, N_k] that all leading dimensions of `dense` have in common. Raises `PatternError`."""
    if dense.ndim < 2:
        raise PatternError(f"expected a pattern [N_q, N_k], found shape {dense.shape}")
    slices = dense.reshape(math.prod(dense.shape[:-2]), *dense.shape[-2:])
    for i in range(1, len(slices)):
        if not np.array_equal(slices[i], slices[0]):
            where = tuple(map(int, np.unravel_index(i, dense.shape[:-2])))
            raise PatternError(
                f"expected one pattern for every head and batch entry, found a mask of shape {dense.shape} whose slice "
                f"at {where} differs from the first; make a plan for each"
            )
    if not len(slices):
        raise PatternError(f"expected a pattern [N_q, N_k], found shape {dense.shape}")
    return slices[0]


def added_to_scores(value: float) -> str:
    """What to do with a mask that holds `value`, where it looks like one that is added to scores."""
    return "; give `mask == 0` for a mask that is added to scores" if value == -np.inf else ""


def _check_binary(values):
    if values.dtype == bool:
        return
    if not (np.issubdtype(values.dtype, np.integer) or np.issubdtype(values.dtype, np.floating)):
        raise PatternError(f"expected a boolean or 0/1 pattern, found dtype {values.dtype}")
    if np.issubdtype(values.dtype, np.floating) and np.isnan(values).any():
        raise PatternError("expected a boolean or 0/1 pattern, found NaN")
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        found = wrong.flat[0]
        raise PatternError(f"expected a boolean or 0/1 pattern, found the value {found}{added_to_scores(found)}")


def save(path: str | Path, graph: Graph, made_by: dict[str, Any] | None = None) -> None:
    """Write a graph.

    Up to `FULL_ENTRIES` entries `scipy.sparse.load_npz` opens the file as the full pattern; above, as the distinct
    rows, and the header says ``storage: classes``.
    """
    full = graph.entries <= FULL_ENTRIES
    indptr, indices = graph.expand() if full else (graph.indptr, graph.indices)
    arrays = {
        "format": np.array(b"csr"),
        "shape": np.array([graph.n_rows if full else graph.n_distinct, graph.n_cols]),
        "indptr": indptr,
        "indices": indices,
        "data": np.ones(len(indices), bool),
        # The name that version 1 of the file has for it.
        "row_class": graph.row_id,
    }
    for name in ("row_hint", "col_hint", "row_order", "col_order"):
        if (value := getattr(graph, name)) is not None:
            arrays[name] = value
    header = {
        "storage": "full" if full else "classes",
        "shape": list(graph.shape),
        "entries": graph.entries,
        "id": graph.id,
        "meta": graph.meta,
    }
    artifacts.write_npz(path, KIND, VERSION, arrays, header, made_by, compress=True)


class _Header(msgspec.Struct):
    storage: Literal["full", "classes"]
    shape: tuple[contents.Size, contents.Size]
    entries: int
    id: str
    meta: dict


def load(path: str | Path) -> Graph:
    """Read a graph that `save` wrote. Its contents and their digest are checked. Raises `ArtifactError`."""
    arrays, header = artifacts.read_npz(path, KIND, VERSION)
    header = contents.fields(path, KIND, header, _Header)
    (n_rows, n_cols), full = header.shape, header.storage == "full"
    optional = {
        name: (arrays[name].dtype if name.endswith("hint") else np.int32, size)
        for name, size in (("row_hint", n_rows), ("col_hint", n_cols), ("row_order", n_rows), ("col_order", n_cols))
        if name in arrays
    }
    # For scipy alone.
    arrays = {name: array for name, array in arrays.items() if name not in ("format", "shape", "data")}
    stored = {"indptr": (np.int64, n_rows + 1 if full else None), "indices": (np.int32, None)}
    contents.arrays(path, arrays, **stored, row_class=(np.int32, n_rows), **optional)
    indptr, indices, row_id = (arrays.pop(name) for name in ("indptr", "indices", "row_class"))
    contents.bounds(path, "indptr", indptr, len(indices))
    contents.within(path, "indices", indices, 0, n_cols - 1)
    if full:
        # Distinct rows are numbered by first appearance in some order: take one query of each.
        distinct, first = np.unique(row_id, return_index=True)
        contents.within(path, "row_class", distinct, 0, len(distinct) - 1)
        indptr, indices = take_rows(indptr, indices, first)
    contents.within(path, "row_class", row_id, 0, len(indptr) - 2)
    starts = np.zeros(len(indices), bool)
    starts[indptr[:-1][np.diff(indptr) > 0]] = True
    contents.expect(path, (starts[1:] | (np.diff(indices) > 0)).all(), "the keys of a row in order", "others")
    for name in optional:
        if name.endswith("hint"):
            contents.expect(path, arrays[name].dtype.kind in "iu", f"{name}: integers", arrays[name].dtype)
        else:
            contents.permutation(path, name, arrays[name])
    graph = Graph(indptr, indices, row_id, n_cols, header.meta, **arrays)
    contents.expect(path, graph.entries == header.entries > 0, f"{header.entries} entries", graph.entries)
    if graph.id != header.id:
        raise ArtifactError(f"{path}: expected content {header.id}, found {graph.id}: the file was altered")
    return graph


def read_mask(path: str | Path, **keywords: Any) -> Graph:
    """Read a pattern from a file.

    Parameters
    ----------
    path : str or Path
        A file of a `Graph` or of a scipy sparse matrix (``.npz``), of a dense array (``.npy``), or of one dense or
        sparse tensor (``.pt``). Only tensors are read from a ``.pt`` file.
    **keywords
        ``meta``, ``row_hint`` and ``col_hint``, see `Graph`.

    Returns
    -------
    Graph

    Raises
    ------
    ArtifactError
        For a file that is missing, damaged or of another type.
    PatternError
        For a matrix that is no pattern.
    """
    import scipy.sparse as sp

    path = Path(path)
    if not path.is_file():
        raise ArtifactError(
            f"{path}: no such file; expected a mask in .npz (scipy CSR), .npy (dense) or .pt form. For a pattern by "
            "name call tilewright.nn.patterns.graph(name, grid, special tokens)"
        )
    try:
        if path.suffix == ".npy":
            return from_pattern(np.load(path, allow_pickle=False), **keywords)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                ours = "tilewright" in archive.files
            return load(path) if ours else from_pattern(sp.load_npz(path), **keywords)
        if path.suffix == ".pt":
            return from_pattern(_tensor(path), **keywords)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: expected a mask in .npz, .npy or .pt form, found: {error}") from error
    raise ArtifactError(f"{path}: expected a file ending in .npz, .npy or .pt, found {path.suffix!r}")


def _tensor(path):
    """The pattern in a ``.pt`` file: a dense array, or a scipy matrix of a sparse tensor. Raises `ArtifactError`."""
    import torch
    from scipy.sparse import coo_array

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: expected a file of one tensor, found others, or damage: {reason}") from error
    if not isinstance(found, torch.Tensor):
        raise ArtifactError(f"{path}: expected a file of one tensor, found {type(found).__name__}")
    if found.layout == torch.strided:
        return found.detach().numpy()
    found = found.to_sparse_coo().coalesce()
    if found.ndim != 2:
        raise PatternError(f"{path}: expected a sparse tensor [N_q, N_k], found shape {tuple(found.shape)}")
    return coo_array((found.values().numpy(), tuple(found.indices().numpy())), tuple(found.shape))
