"""How a model computes: its forward pass over paged KV, alone or with other processes."""
