"""The life of a process: settings, logs, metrics, keys, systemd."""
