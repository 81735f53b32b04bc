"""Write a token map of the most frequent tokens of your own text or traffic: ``python -m specserve.token_map``."""
