"""Model families whose attention becomes a graph (stage T1).

Contract of a member module:
    ``NAMING``: how its workloads are named, with an example; shown when a name of the family is unknown.
    ``Params``: a frozen `msgspec.Struct` (``forbid_unknown_fields``) of everything that decides the graph.
    ``fields(name) -> dict | None``: the parameters that a workload name such as ``vil-tiny-224-s1`` states; None when
        the name is not of this family.
    ``graph(params) -> Graph``: the exact pattern in the model's own token order, with ``meta`` holding ``family``,
        ``heads``, ``head_dim``, ``grid`` and ``bias``, and ``case`` where it is not what inference runs.
    ``sources(params) -> list``: the user's files that the graph is made from; may be left out where there are none.
    ``entered(params) -> list``: dotted names of the modules that make the graph and that the member enters by a name
        which `params` holds; may be left out where there are none.
    ``size(params) -> int``: at most how many numbers the graph holds, its tokens and the entries of its distinct rows;
        known without making it, so that a cluster can be asked for memory and time.
    ``NETWORK_NAMING``, ``network_fields(name) -> dict | None``: for families with a network, as ``NAMING`` and
        ``fields`` but for the names of whole networks, such as ``vil-tiny-224``, and the options of
        `tilewright.networks.create`. They stand here because what Snakemake parses must not import torch.
"""

import os
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from tilewright.core import arguments, contents
from tilewright.core.errors import ConfigError, PatternError, UnknownNameError

NAMES = (
    *("vision_longformer", "regionvit", "dynamicvit"),
    *("band", "dilated", "axial", "bigbird", "swin", "swin_stage", "window3d", "mix", "powerlaw", "file"),
    "neighborhood",
)

# Graphs do not change with the networks.
APART = ("tilewright.networks",)

# At least what is held of each number of a graph while it is made.
NUMBER_BYTES = 16

if TYPE_CHECKING:
    from tilewright.graph import Graph


def members() -> list[ModuleType]:
    """The family modules, in the order of `NAMES`."""
    return [import_module(f"{__name__}.{name}") for name in NAMES]


def parse(name: Any, overrides: Any = None) -> tuple[ModuleType, Any]:
    """Read a workload name into ``(module, params)``; `overrides` replaces or adds parameters by name.

    Raises `UnknownNameError` for a name of no family and `ConfigError` for an override that is unknown, of the wrong
    type or out of range, or that leaves a parameter open.
    """
    if not isinstance(name, str):
        raise UnknownNameError("workload", arguments.shown(name), [module.NAMING for module in members()])
    if overrides is not None and not isinstance(overrides, dict):
        raise ConfigError(f"overrides: expected parameters by name, found {arguments.shown(overrides)}")
    for module in members():
        if (fields := module.fields(name)) is not None:
            try:
                return module, msgspec.convert({**fields, **arguments.plain(overrides or {})}, module.Params)
            except msgspec.ValidationError as error:
                known = ", ".join(module.Params.__struct_fields__)
                raise ConfigError(
                    f"workload {name}: {contents.said(error, module.Params)}; parameters: {known}"
                ) from None
    namings = [module.NAMING for module in members()]
    own = [naming for naming in namings if naming.partition("-")[0] == name.partition("-")[0]]
    raise UnknownNameError("workload", name, own or [naming.rpartition("e.g. ")[2] for naming in namings])


def build(name: str, overrides: Any = None) -> "Graph":
    """Build the graph of a workload.

    Parameters
    ----------
    name : str
        Name of a workload, such as ``vil-tiny-224-s1``.
    overrides : dict, optional
        Parameters of the workload by name, such as ``{"window": 9}``.

    Returns
    -------
    Graph
        ``meta["model"]`` is the name, and ``meta["params"]`` has all parameters.

    Raises
    ------
    UnknownNameError
        For a name of no family.
    ConfigError
        For parameters that are unknown or out of range.
    PatternError, ArtifactError
        For a graph that is too large for the memory, and for a file that cannot be read.

    Examples
    --------
    >>> from tilewright import masks
    >>> masks.build("vil-tiny-64-s1").shape
    (257, 257)
    """
    module, params = parse(name, overrides)
    # How many numbers a file holds is not known before it is read.
    needed = 0 if sources(module, params) else NUMBER_BYTES * module.size(params)
    if needed > (memory := _memory_bytes()):
        raise PatternError(
            f"workload {name}: expected a graph of at most the memory, {memory / 1e9:.0f} GB, found "
            f"{needed / 1e9:.3g} GB"
        )
    graph = module.graph(params)
    return replace(graph, meta={**graph.meta, "model": name, "params": msgspec.to_builtins(params)})


def sources(module: ModuleType, params: Any) -> list[str]:
    """The user's files that the graph of a family's `module` is made from."""
    return module.sources(params) if hasattr(module, "sources") else []


def _memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(name: str, overrides: dict[str, str] | None = None) -> int:
    """At most how many numbers the graph of a workload holds: tokens and entries of its distinct rows.

    Raises as `parse` does, and `ArtifactError` where the user's file is missing.
    """
    module, params = parse(name, overrides)
    return module.size(params)


def modules(name: str, overrides: dict[str, str] | None = None) -> tuple[str, ...]:
    """Dotted names of the modules that make the graph of a workload, for digests of code: with all they import.

    Raises as `parse` does.
    """
    module, params = parse(name, overrides)
    return __name__, module.__name__, *(module.entered(params) if hasattr(module, "entered") else ())
