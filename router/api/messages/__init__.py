"""Anthropic's API: what its clients send to /v1/messages, and what they are answered."""
