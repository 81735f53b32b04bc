"""HTTP: the OpenAI protocol, streaming, errors."""
