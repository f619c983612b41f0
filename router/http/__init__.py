"""The HTTP side of the router: the APIs, status pages, limits and the server."""
