"""Plans on CPUs: probe, executor and backward."""
