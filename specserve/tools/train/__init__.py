"""Training of draft heads for a frozen target: ``python -m specserve.train``."""
