"""Completions: from generated tokens to deltas, and from deltas to OpenAI's responses."""
