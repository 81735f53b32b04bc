"""The operations as Triton kernels, in the rooms and files of ``reference/``."""
