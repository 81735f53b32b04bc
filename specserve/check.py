"""Preflight: ``python -m specserve.check``."""

import sys

from specserve.tools.check.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
