"""Search for the best shape: ``python -m specserve.tune``."""

import sys

from specserve.tools.tune.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
