"""Shared parts of all processes: settings, logs, metrics, keys, signals and systemd."""
