"""Write a token map: ``python -m specserve.token_map``."""

import sys

from specserve.tools.token_map.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
