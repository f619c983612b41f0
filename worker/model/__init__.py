"""What a model is: read from Hugging Face directories, and cut for several processes."""
