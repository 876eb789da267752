"""Slices on CPUs."""
