"""Attention of packed batches: images of different numbers of tokens, one after the other."""
