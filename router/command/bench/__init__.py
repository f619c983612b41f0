"""`baton bench`: measures a running server under load, and checks every response."""
