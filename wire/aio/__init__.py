"""Asyncio sockets and timers for the sans-IO protocol in `wire`."""
