"""Plans on NVIDIA GPUs: probe, executors, kernels and backward."""
