"""The operators on NVIDIA GPUs: launches of csrc/*.cu, and copies of KV to and from the host."""
