"""Draft heads and readers of their checkpoints, one file for each kind, shared by serving and training."""
