"""Transfer of KV between workers."""
