"""The published formulation of each family, as the family's network defines it."""

TRACED, READS = "formula", True


def order(site):
    """Tokens stay in the model's order."""
    return None


def prepare(site, bias, dtype, device):
    """The site's own formulation."""
    return lambda q, k, v: site.native(q, k, v, bias)


def taking(site, dtype, device):
    """Likewise."""
    return lambda q, k, v, bias: site.native(q, k, v, bias.to(dtype))
