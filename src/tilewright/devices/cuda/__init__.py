"""NVIDIA GPUs: facts, probe and executors."""
