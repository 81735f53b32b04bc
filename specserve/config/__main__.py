"""Print the reference of all settings."""

from specserve.config.reference import reference

print(reference(), end="")
