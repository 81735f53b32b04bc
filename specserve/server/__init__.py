"""The HTTP server: the OpenAI protocol, streaming and errors."""
