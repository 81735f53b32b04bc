"""Target models, one file for each architecture, and how their checkpoints are read."""
