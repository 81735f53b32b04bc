"""Start the server: ``python -m specserve``, as ``python -m specserve.launch`` does."""

from specserve.launch import end, main

if __name__ == "__main__":
    end(main())
