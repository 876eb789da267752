"""Peers that Tilewright is measured against, on sparse patterns and on packed batches; only the study imports them."""
