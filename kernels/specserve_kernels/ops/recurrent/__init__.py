"""Layers that keep a state instead of every token's keys and values, on a GPU."""
