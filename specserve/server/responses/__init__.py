"""OpenAI's Responses API, without a store: a translation onto chat."""
