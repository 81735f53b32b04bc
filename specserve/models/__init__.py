"""Target models, one file for each architecture, and readers of their checkpoints."""
