"""What experiments share: rows, checks, the lock of a device, and how long to measure."""
