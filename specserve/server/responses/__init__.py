"""OpenAI's Responses API without stored responses, translated to chat."""
