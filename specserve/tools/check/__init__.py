"""What a server with these settings would be, without serving: ``python -m specserve.check``."""
