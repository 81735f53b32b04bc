"""Chooses the shape of each step: what drafts gain and what steps cost."""
