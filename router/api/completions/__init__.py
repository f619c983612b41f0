"""What a request is answered: pieces of text and tokens, and how OpenAI's clients read them."""
