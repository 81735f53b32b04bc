"""Projections, in Triton."""
