"""Measurements. Each prints a table and writes JSON to ``results/``."""

import specserve as specserve  # first: it says how OpenMP's threads wait, which PyTorch reads when it is imported
