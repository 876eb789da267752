"""What every other part stands on; it imports nothing else of the package."""
