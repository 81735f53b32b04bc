"""Draft heads, one file each, shared by serving and training."""
