"""CPUs: facts, probe and executors."""
