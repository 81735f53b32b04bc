"""Assembles an engine and runs it: in this process or in one of its own, watched and restarted."""
