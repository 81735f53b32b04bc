"""Attention over a paged cache, in PyTorch."""
