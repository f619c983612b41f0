"""Request bodies: fields and their ranges, conversations, structures."""
