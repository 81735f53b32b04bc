"""Text side: tokenizer and chat template in, detokenizer and stop strings out, messages to the engine."""
