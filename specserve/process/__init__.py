"""Assemble an engine and run it: in a thread of this process, or in its own process that is watched and restarted."""

import os

# Choosing it after PyTorch's import prints a warning.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
