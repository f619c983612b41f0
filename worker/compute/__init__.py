"""The forward pass of a model over paged KV, in one process or in several."""
