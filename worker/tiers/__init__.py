"""KV tiers: blocks of the prefix cache in host memory and on disk."""
