"""Sockets, processes and clocks around the sans-IO protocol of `wire`."""
