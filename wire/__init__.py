"""The Baton protocol: usable alone, no sockets outside `wire.aio`."""
