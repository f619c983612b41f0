"""The HTTP side of the router: the OpenAI API and what is around it."""
