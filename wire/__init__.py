"""The Baton protocol: usable alone; its sockets are in `wire.aio`."""
