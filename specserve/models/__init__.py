"""Target models, one file an architecture, and how their checkpoints are read."""
