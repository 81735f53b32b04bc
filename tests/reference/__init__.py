"""Slow, simple references written only from design.md and formats.md; they import nothing of the product."""
