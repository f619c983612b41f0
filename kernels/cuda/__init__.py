"""The operators on NVIDIA GPUs: csrc/*.cu, what is decided on the host, and KV on its way out."""
