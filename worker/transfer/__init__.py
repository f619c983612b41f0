"""KV in and out of a worker."""
