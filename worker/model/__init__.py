"""Reads models from Hugging Face directories, and cuts them for several processes."""
