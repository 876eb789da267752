"""Scenes drawn on an NVIDIA GPU: launches of `cuda_kernels`. The contract is that of `scenes.backends`."""

import torch
import triton

from tilewright_study.scenes import cuda_kernels

# Rows and columns of the tile of a program, and its warps.
ROWS, COLUMNS, NUM_WARPS = 8, 32, 4


def draw(arrays, texels, pixels):
    """See `scenes.backends`."""
    (scenes, objects), (height, width) = arrays[0].shape[:2], pixels
    arrays = [_uploaded(torch.from_numpy(array), texels.device) for array in arrays]
    pictures = torch.empty(scenes, 3, height, width, dtype=torch.uint8, device=texels.device)
    labels, owners = (torch.empty(scenes, height, width, dtype=torch.uint8, device=texels.device) for _ in range(2))
    programs = triton.cdiv(height, ROWS) * triton.cdiv(width, COLUMNS), scenes
    cuda_kernels.tilewright_scene[programs](
        pictures, labels, owners, texels, *arrays, height, width, objects, ROWS, COLUMNS, num_warps=NUM_WARPS
    )
    return pictures, labels, owners


def _uploaded(array, device):
    """`array` on `device`; the host does not wait for what the device still has to do."""
    return array.pin_memory().to(device, non_blocking=True) if device.type != array.device.type else array
