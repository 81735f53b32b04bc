"""Parsers of answers: reasoning and calls of tools, found in text that arrives in pieces."""
