"""The engine as a library inside a Python program, without a network."""
