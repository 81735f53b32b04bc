"""Train a draft head: ``python -m specserve.train``."""

from specserve.tools.train.__main__ import main

if __name__ == "__main__":
    main()
