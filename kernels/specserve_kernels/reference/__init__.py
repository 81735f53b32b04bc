"""The operations in PyTorch: the CPU backend, and the oracle that the kernels are tested against."""
