"""Prometheus metrics of the front process."""
