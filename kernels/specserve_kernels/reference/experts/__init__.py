"""Mixtures of experts in PyTorch."""
