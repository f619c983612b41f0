"""The description of the API, as OpenAPI has it and as a page to read."""
