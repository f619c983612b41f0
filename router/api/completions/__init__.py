"""Responses to a request: deltas of text and tokens, and OpenAI's form of them."""
