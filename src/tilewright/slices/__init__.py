"""Slices: attention of groups of queries to lists of single keys, chosen on the device."""
