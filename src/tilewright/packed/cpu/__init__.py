"""Packed batches on CPUs."""
