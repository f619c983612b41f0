"""Request bodies: shared fields and their ranges, conversations, structured output."""
