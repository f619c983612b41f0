"""The last requests: how each was served, and why its prompt was not cached further."""
