"""Neighbourhoods on NVIDIA GPUs."""
