"""The Baton wire protocol, usable on its own.  Asyncio sockets are in `wire.aio`."""
