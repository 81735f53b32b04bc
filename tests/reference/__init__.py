"""Slow, plain references written from design.md and formats.md alone; nothing of the product is imported."""
