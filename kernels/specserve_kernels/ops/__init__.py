"""The operations as Triton kernels, in the same folders and files as in ``reference/``."""
