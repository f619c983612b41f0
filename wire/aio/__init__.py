"""Sockets and timers around the sans-IO protocol of `wire`."""
