"""The operations as Triton kernels, in the same folders and files as in ``reference/``."""

import os

# Triton 3.10 will not fuse unless it is told to, which would round differently; 3.9 warns of that.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
