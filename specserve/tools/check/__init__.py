"""Report on a server's settings and files without serving: ``python -m specserve.check``."""
