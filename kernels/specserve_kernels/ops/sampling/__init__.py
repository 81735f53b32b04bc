"""Noise, penalties, truncation and the choice of tokens, in Triton."""
