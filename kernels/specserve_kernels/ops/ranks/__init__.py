"""Kernels of ranks that read and write each other's memory."""
