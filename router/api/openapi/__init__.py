"""The description of the API, as an OpenAPI document and as an HTML page."""
