"""Plans on an abacus."""
