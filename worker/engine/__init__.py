"""The engine: sequences, blocks, scheduler, step."""
