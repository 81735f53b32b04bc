"""Owns the device: weights, memory budget, the runner, the sampler."""
