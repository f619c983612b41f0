"""A worker: the engine, its executors, KV transfer, and the prefill and decode roles."""
