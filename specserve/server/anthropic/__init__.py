"""Anthropic's Messages API: a translation onto chat."""
