"""Which of torch's kernels for attention a training may use."""

from contextlib import contextmanager

import torch


@contextmanager
def finite():
    """Leave out cuDNN's attention, which torch 2.11 and later prefer on Hopper.

    Its backward makes NaN of gradients where the keys are 64 more than a multiple of 128 and all scores of a query lie
    far below zero (https://github.com/pytorch/pytorch/issues/196678): the loss is finite, and no step is of use. All
    stages of a SegFormer have 64 keys where images have 256 pixels.

    On an H100 half of the steps of SegFormer-B1 and -B2 were lost to it, those of images of 256 pixels: all of these
    before, none since (docs/dynamic.md). The report is of calls with a mask, ours have none.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
