"""Generators of questions with their answers, one module a subject."""
