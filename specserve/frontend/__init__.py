"""The text side: tokenizer, chat template, detokenizer, stop strings, parsers, and requests to the engine."""
