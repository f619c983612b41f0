"""Reads models from Hugging Face directories, and shards them across several processes."""
