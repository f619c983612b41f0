"""Text processing: tokenizer, chat templates, stop strings, and parsers of model output."""
