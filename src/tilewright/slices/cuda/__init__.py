"""Slices on NVIDIA GPUs."""
