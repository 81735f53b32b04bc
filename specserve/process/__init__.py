"""Assemble an engine and run it, in this process or in its own process that is watched and restarted."""
