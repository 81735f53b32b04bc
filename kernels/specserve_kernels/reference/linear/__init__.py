"""Projections, in PyTorch."""
