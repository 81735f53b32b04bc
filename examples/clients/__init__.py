"""Programs that talk to a running server, and one that needs none."""
