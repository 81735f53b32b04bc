"""Write a datastore for REST from your own text: ``python -m specserve.datastore``."""
