"""The engine inside a program, without any network."""
