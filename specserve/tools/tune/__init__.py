"""Find the fastest speculation shape for this machine and your prompts: ``python -m specserve.tune``."""
