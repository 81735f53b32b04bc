"""Benchmarks. Each prints a table and writes JSON to ``results/``."""
