"""Kernels on feature maps of each kind of device: ``networks/<device>``. Contract of the folder:

``maps.py``, optional: kernels for networks that make maps. A device without it runs torch's operators alone.
    ``FORMS``: ``{operator: forms}``, those worth timing. ``REFUSALS``: what is raised for a form that does not fit.
    ``copier(device) -> callable(out, x)``: copies x to out, contiguous tensors of one shape and type on that
        ``torch.device``, at the least cost for the host.
    ``decode(…, form)``, ``dwconv_gelu(…, form)``, ``patches(…, form)``, ``norm(…, form)``, ``norm_linear(…, form)``,
        ``attention(…, form)``, ``linear_add(…, form)``: what the operators of these names in `networks.map_operators`
        compute, with sums in float32. Raises `PatternError` for tensors of several types, or that need a gradient.
``frames.py``, optional: kernels that networks of maps begin and end with.
    ``prepare(out, frames, rows, columns, scale)``: images of frames, see `paths.frames`. rows, columns: the tensors of
        `paths.frames.taps` of each side. scale: [2, 3], what each channel is multiplied with, and what is added.
    ``label(out, maps, rows, columns, most)``: the classes of maps, see `paths.frames.labels`. rows, columns: the
        tensors of `paths.frames.cells` of each side. most: pixels of a cell along each side, at most.
"""

from types import ModuleType

from tilewright import devices


def maps(kind: str) -> ModuleType | None:
    """The module of kernels on maps of `kind`, None where there is none. Raises `DeviceError` for an unknown kind."""
    return devices.module(kind, "networks.maps") if devices.has(kind, "networks.maps") else None


def frames(kind: str) -> ModuleType | None:
    """As `maps`, of the kernels on frames."""
    return devices.module(kind, "networks.frames") if devices.has(kind, "networks.frames") else None
