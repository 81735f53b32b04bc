"""Parsers of answers: find reasoning and tool calls in text that arrives in pieces."""
