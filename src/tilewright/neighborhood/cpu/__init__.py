"""Neighbourhood attention on a CPU."""
