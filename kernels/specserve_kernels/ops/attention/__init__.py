"""Attention over a paged cache, in Triton."""
