"""Several router processes that share one port: `--processes N`."""
