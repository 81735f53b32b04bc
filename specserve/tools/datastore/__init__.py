"""A datastore for REST of your own text: ``python -m specserve.datastore``."""
