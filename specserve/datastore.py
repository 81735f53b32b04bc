"""Write a datastore: ``python -m specserve.datastore``."""

import sys

from specserve.tools.datastore.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
