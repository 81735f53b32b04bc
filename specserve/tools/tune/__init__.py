"""The speculation shape that pays on this machine with these prompts: ``python -m specserve.tune``."""
