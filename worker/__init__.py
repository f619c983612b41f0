"""Compute: the engine, its executors, and the prefill and decode roles."""
