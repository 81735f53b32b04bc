"""Data, tokenizer and evaluation sets of the small chat model that is bundled with the server."""
