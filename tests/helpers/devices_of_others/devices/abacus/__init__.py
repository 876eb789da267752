"""A device that the package does not have: the CPU, one work item after another."""
