"""Packed batches on NVIDIA GPUs."""
