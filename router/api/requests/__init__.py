"""What a request asks for: fields and their ranges, conversations, structures."""
