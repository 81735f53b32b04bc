"""Write the pages of docs/ that are generated from the code: ``python -m specserve.tools.reference``."""
