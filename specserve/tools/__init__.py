"""Offline tools: they may import anything, and nothing imports them."""
