"""Assemble an engine and run it: in a thread of this process, or in its own process that is watched and restarted."""

import os

os.environ.setdefault(
    "TORCH_BLAS_PREFER_CUBLASLT", "1"
)  # choosing it after PyTorch's import prints a warning
