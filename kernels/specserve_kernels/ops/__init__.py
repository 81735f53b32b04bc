"""The operations as Triton kernels, one file for each of ``reference/``."""
