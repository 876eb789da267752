"""Frames of a camera or a file on their way to a network and back: images that it takes, and a class for each pixel.

A frame is uint8 [height, width, 3]. It is resized as Pillow does, bilinear over all pixels that a smaller one covers,
and normalised. Maps of logits are interpolated to the frame's size, bilinear, and the largest logit names the class.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core import arguments, images
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.networks import backends

# Of ImageNet's images, which public weights were trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Classes that a class map has numbers for.
MOST_CLASSES = 256


def taps(side: int, whole: int) -> tuple[np.ndarray, np.ndarray]:
    """How `whole` pixels are made of `side`: the first one of each, int32 [whole], and shares, float32 [whole, taps].

    A triangle as wide as the larger of a pixel of each, as Pillow and torch (``antialias=True``) have it.
    """
    step = side / whole
    reach = max(step, 1.0)
    centre = step * (np.arange(whole) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), side)
    place = first[:, None] + np.arange(int((last - first).max()))
    shares = np.maximum(0.0, 1 - np.abs((place + 0.5 - centre[:, None]) / reach)) * (place < last[:, None])
    return first.astype(np.int32), (shares / shares.sum(1, keepdims=True)).astype(np.float32)


def cells(side: int, whole: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where `whole` pixels lie among `side` places of a map: ``(cell, behind, begin)``.

    cell, int32 [whole]: the place before each pixel, -1 for none. behind, float32 [whole]: how far it lies behind that
    place, in 0..1. begin, int32 [side + 2]: the first pixel of each cell, from -1 on, and one behind the last. Numbers
    are float32, as torch's are.
    """
    at = (np.arange(whole, dtype=np.float32) + np.float32(0.5)) * np.float32(side / whole) - np.float32(0.5)
    cell = np.minimum(np.floor(at).astype(np.int32), side - 1)
    behind = np.where(cell < 0, np.float32(0), at - cell)
    begin = np.searchsorted(cell, np.arange(-1, side + 1)).astype(np.int32)
    return cell, behind.astype(np.float32), begin


def labels(maps: torch.Tensor, size: tuple[int, ...], out: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [B, H, W]: the class of the largest logit of each pixel, of equal ones the first.

    maps: [B, classes, h, w] of at most `MOST_CLASSES`, interpolated as the module says, in float32. size: H and W. out:
    where the classes are written to.
    """
    if out is None:
        out = torch.empty(len(maps), *size, dtype=torch.uint8, device=maps.device)
    rows, columns = (_cells_on(*sides, maps.device) for sides in zip(maps.shape[2:], size, strict=True))
    if maps.is_cpu:
        # Compiled when it is first imported, for seconds, and then kept beside its source.
        from tilewright.paths import _compiled

        of_pixels = rows[0].numpy(), rows[1].numpy(), columns[0].numpy(), columns[1].numpy()
        for logits, found in zip(maps.detach().permute(0, 2, 3, 1).float().contiguous().numpy(), out, strict=True):
            _compiled.label(logits, *of_pixels, found.numpy())
        return out
    kernels = backends.frames(maps.device.type)
    if kernels is None:
        return out.copy_(F.interpolate(maps.float(), size=tuple(size), mode="bilinear").argmax(1))
    most = tuple(_most(*sides) for sides in zip(maps.shape[2:], size, strict=True))
    return kernels.label(out, maps, rows, columns, most)


def images_of(
    frames: torch.Tensor, out: torch.Tensor, mean: tuple[float, ...] = MEAN, deviation: tuple[float, ...] = DEVIATION
) -> torch.Tensor:
    """Write to `out` [B, 3, h, w] the images that a network takes of frames uint8 [B, H, W, 3], see the module."""
    scale = _scale(mean, deviation, out.device)
    kernels = None if out.is_cpu else backends.frames(out.device.type)
    if kernels is not None:
        rows, columns = (_taps_on(*sides, out.device) for sides in zip(frames.shape[1:3], out.shape[2:], strict=True))
        return kernels.prepare(out, frames, rows, columns, scale)
    made = frames.permute(0, 3, 1, 2).float()
    if made.shape[2:] != out.shape[2:]:
        made = F.interpolate(made, size=out.shape[2:], mode="bilinear", antialias=True)
    return out.copy_(made * scale[0, :, None, None] + scale[1, :, None, None])


@cache
def _scale(mean, deviation, device):
    gain = 1 / (255 * torch.tensor(deviation, dtype=torch.float64))
    return torch.stack((gain, -255 * gain * torch.tensor(mean, dtype=torch.float64))).float().to(device)


@cache
def _taps_on(side, whole, device):
    return tuple(torch.from_numpy(x).to(device) for x in taps(side, whole))


@cache
def _cells_on(side, whole, device):
    return tuple(torch.from_numpy(x).to(device) for x in cells(side, whole))


@cache
def _most(side, whole):
    """Pixels of a cell, at most."""
    return int(np.diff(cells(side, whole)[2]).max())


class Places:
    """Where the frames of a call and their class maps are, on a device and, beside a GPU, in pinned memory of the host.

    size: height and width of frames. mean, deviation: of the network's training, of channels in 0..1.
    """

    def __init__(
        self,
        size: tuple[int, int],
        batch: int,
        device: torch.device,
        mean: tuple[float, ...] = MEAN,
        deviation: tuple[float, ...] = DEVIATION,
    ):
        """Memory for `batch` frames. Raises `ConfigError` for a size, means or deviations that are none."""
        height, width = arguments.sizes("frame", size, 2)
        if (count := 3 * batch * height * width) > arguments.MOST:
            raise ConfigError(f"frame: expected at most {arguments.MOST} numbers in a call, found {count}")
        self.mean, self.deviation = _three("mean", mean), _three("std", deviation)
        if min(self.deviation) <= 0:
            raise ConfigError(f"std: expected numbers above 0, found {arguments.shown(deviation)}")
        self.size, self.shape = (height, width), (batch, height, width, 3)
        # Tensors of inference can only be written to where inference is on.
        with torch.inference_mode(False):
            self.frames = torch.zeros(self.shape, dtype=torch.uint8, device=device)
            self.labels = torch.zeros(self.shape[:3], dtype=torch.uint8, device=device)
            self.host_frames, self.host_labels = self.frames, self.labels
            if self.frames.is_cuda:
                self.host_frames = torch.zeros(self.shape, dtype=torch.uint8, pin_memory=True)
                self.host_labels = torch.zeros(self.shape[:3], dtype=torch.uint8, pin_memory=True)

    def copy_in(self) -> None:
        """Frames from the host's memory to the device's."""
        self.frames.copy_(self.host_frames, non_blocking=True)

    def prepare(self, out: torch.Tensor) -> torch.Tensor:
        """Write the images that a network takes to `out`."""
        return images_of(self.frames, out, self.mean, self.deviation)

    def label(self, maps: torch.Tensor) -> torch.Tensor:
        """Write the classes of maps."""
        return labels(maps, self.size, self.labels)

    def copy_out(self) -> None:
        """Class maps from the device's memory to the host's."""
        self.host_labels.copy_(self.labels, non_blocking=True)


def _three(name, values):
    found = [arguments.real(x) for x in arguments.each(values) or ()]
    if len(found) != 3 or None in found:
        raise ConfigError(f"{name}: expected a number for each of 3 channels, found {arguments.shown(values)}")
    return tuple(found)


def opened(frame: Any, size: tuple[int, int], batch: int = 1) -> torch.Tensor:
    """A frame, or `batch` of them, as a tensor uint8 [batch, H, W, 3] of this size.

    frame: a tensor on the host or a GPU or an array, uint8 [H, W, 3] or [batch, H, W, 3]; an image of Pillow, or the
    path of a file. An image is turned as its EXIF data says.

    Raises `PatternError` for frames of another size, type or mode, and `ArtifactError` for a file that is no whole
    image.
    """
    shape = (batch, *size, 3)
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8:
        frame = torch.from_numpy(np.ascontiguousarray(frame))
    elif not isinstance(frame, torch.Tensor) and (isinstance(frame, (str, Path)) or hasattr(frame, "getexif")):
        frame = _pixels(frame)
    if not isinstance(frame, torch.Tensor) or frame.dtype is not torch.uint8 or not _readable(frame):
        raise PatternError(f"frame: expected uint8 {_sizes(shape)} or an image, found {arguments.shown(frame)}")
    if frame.ndim == 3 and batch == 1:
        frame = frame[None]
    if frame.shape != shape:
        raise PatternError(
            f"frame: expected {_sizes(shape)} of the runner, found {_sizes(frame.shape) or 'no dimension'}; resize it, "
            "or make a runner for its size"
        )
    return frame


def _readable(frame):
    return frame.layout is torch.strided and (frame.is_cpu or frame.is_cuda)


def _pixels(image):
    """uint8 [H, W, 3] of an image of Pillow or of a file. Raises `ArtifactError` and `PatternError`."""
    where: str | Path = "frame"
    if isinstance(image, (str, Path)):
        found, where = images.opened(image), image
    else:
        try:
            found = images.turned(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise ArtifactError(f"frame: expected a whole image, found: {error}") from error
    if found.mode != "RGB":
        raise PatternError(f"{where}: expected an RGB image, found mode {found.mode}; call its convert('RGB')")
    return torch.from_numpy(np.array(found))


def _sizes(shape):
    return "x".join(map(str, shape))
