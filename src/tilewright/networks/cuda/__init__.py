"""Kernels on feature maps, on NVIDIA GPUs."""
