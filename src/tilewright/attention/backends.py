"""What runs plans on each kind of device, and what they cost there: ``attention/<device>``. Contract of the folder:

``probe.py``.
    ``measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s)``: times the shapes of
        ``attention.blocks.work.items(blocks, split_keys)`` in about `budget_s` seconds. Returns ``(launch_us, tile_us,
        shapes)``: two costs of `profile.Profile` and a `profile.ItemShape` each, in the order of the shapes.

``executor.py``.
    ``prepare(schedule, blocks, *, heads, head_dim, dtype, **options)``: an `Executor` of the schedule. blocks: ``{tile:
        Blocks}``. dtype: torch's. Options: ``row_order`` and ``col_order`` (``order[new] = old``, None for the natural
        order), ``ordered`` (q, k, v and the result have their tokens in that order), ``bias`` (see
        `attention.masks.as_bias`), ``scale`` (default ``head_dim ** -0.5``). Raises `ArtifactError` for blocks of
        another schedule, `PatternError` for an order, bias, head dim or scale that does not fit.
    An executor may have ``with_bias(table) -> Executor``: itself with other values of its bias, float32 [H, T] on the
        CPU. Without it executors are prepared anew for other values. Where the module states ``READS_TABLES = True``
        the table is of any float type and on the executor's device. Each call reads it there and waits for nothing, so
        that a capture in a CUDA graph sees the values of each replay.

``backward.py``, optional: ``gradients(executor, q, k, v, out, grad) -> (dq, dk, dv)`` of ``out = executor(q, k, v)``.
    Calls on a device without it that need a gradient are refused. Of executors with a bias, ``gradients_with_bias(…) ->
    (dq, dk, dv, d_table)``: the last float32 [H, T], the sums over the pairs of each entry.

``cost_model.py``, optional: plans are made, and orders compared, by its predictions; without it plans are made of what
    the probe measures.
    ``predict(blocks, *, heads, head_dim, dtype, split_keys, calibration, bias_heads)``: returns what ``probe.measure``
        does. bias_heads: heads with a bias of their own, None without a bias.

``calibration.py``, beside ``cost_model.py``: what its predictions are made of.
    ``of(tiles, head_dim, dtype)``: ``{tile name: calibration}``, read from a file of this device, or of one that comes
        with the package, or measured.
    ``measured(tiles, sizes, anew=False)``: ``{(head dim, type): {tile name: calibration}}`` of such pairs `sizes`, of
        this device alone; anew: measured, whatever there is.
    ``SHIPPED_SIZES``, ``ship(path, calibrations)``: those pairs that come with the package, and a file of them.
    ``summary(calibration)``: what a person wants to know of one, ``{name: text}``.
"""

from collections.abc import Sized
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from tilewright import devices
from tilewright.core.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor


# Roles that whole plans enter, from what their tiles cost to their gradients.
PLANNING = tuple(f"attention.{name}" for name in ("executor", "probe", "calibration", "cost_model", "backward"))


class Executor(Protocol):
    """A prepared schedule. Call it with q [B, H, N_q, D] and k, v [B, H, N_k, D]; it returns attention [B, H, N_q, D].

    The result lies in memory as `devices.qkv.empty` makes it. A query without an allowed key gets zeros. A call raises
    `PatternError` or `DeviceError` for tensors other than planned, or that need a gradient. Several threads may call at
    the same time.

    An executor may have what makes calls like one before cost the host less:
    ``known``: an entry of `devices.qkv.Seen` for q, k and v, of the last call, which ends with whether its result may
        have the layout of q, where the heads of a token do not stand side by side.
    ``joint``, ``joints``: likewise, and a `Seen`, of tensors [B, N, 3 H D] that hold all three, for [B, N, H D].
    ``join(x)``: adds an entry to these, for x whose queries, keys and values the last call had.
    ``again(q, k, v, table)``: the result with values of a bias, for tensors like those of the last such call, or None.
    """

    @property
    def launches(self) -> Sized:
        """The launches of one call."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks that are held between calls."""

    @property
    def executed(self) -> int:
        """Pairs of query and key that one head works through in a call, padding included."""

    def peak_bytes(self, batch: int) -> int:
        """Most bytes that a call for `batch` entries holds beyond its arguments and `memory_bytes`, result included."""

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        """Attention over the pattern."""


def executor(kind: str) -> ModuleType:
    """The module whose `prepare` runs schedules on `kind`. Raises `DeviceError` for a kind that is not known."""
    return devices.module(kind, "attention.executor")


def probe(kind: str) -> ModuleType:
    """The module whose `measure` times shapes on `kind`. Raises `DeviceError` for a kind that is not known."""
    return devices.module(kind, "attention.probe")


def backward(kind: str) -> ModuleType:
    """The module whose `gradients` differentiates executors of `kind`, see `differentiates`."""
    return devices.module(kind, "attention.backward")


def differentiates(kind: str) -> bool:
    """Whether executors of `kind` have a backward. Raises `DeviceError` for a kind that is not known."""
    return devices.has(kind, "attention.backward")


def cost_model(kind: str) -> ModuleType:
    """The module whose `predict` tells what blocks cost on `kind`. Raises `DeviceError` where there is none."""
    return _predicting(kind, "cost_model")


def calibration(kind: str) -> ModuleType:
    """The module whose `of` tells what predictions are made of on `kind`. Raises `DeviceError` where there is none."""
    return _predicting(kind, "calibration")


def _predicting(kind, role):
    if not predicts(kind):
        known = ", ".join(filter(predicts, devices.NAMES))
        raise DeviceError(f"a device of kind {kind!r} has no cost model to calibrate; known: {known}")
    return devices.module(kind, f"attention.{role}")


def predicts(kind: str) -> bool:
    """Whether `kind` has a cost model. Raises `DeviceError` for a kind that is not known."""
    return devices.has(kind, "attention.cost_model")
