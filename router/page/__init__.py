"""The page at `/`: the cluster and its requests as they happen, and a playground."""
