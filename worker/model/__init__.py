"""Transformers of the Llama family, read from Hugging Face directories."""
