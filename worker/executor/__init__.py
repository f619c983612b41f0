"""Executors: what the engine steps, by name."""
