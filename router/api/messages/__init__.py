"""Anthropic's API: request bodies, responses and errors of /v1/messages."""
