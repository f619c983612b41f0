"""The HTTP API: parses request bodies and renders responses.

An invalid request raises an `HttpError` that names the field, or a `WireError`.
"""
