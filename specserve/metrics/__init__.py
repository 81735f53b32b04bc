"""Prometheus metrics of the front."""
