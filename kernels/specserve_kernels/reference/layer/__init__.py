"""Norms, activations, rotary embeddings and a draft head's inputs, in PyTorch."""
