"""Trees of drafted tokens, from growth to commit, in PyTorch."""
