"""Computes a model: its forward pass over paged KV, alone or with other processes."""
