"""The API that clients call: request bodies, and the responses to them.

What reads a request refuses it with an `HttpError` that names the field, or with a `WireError`.
"""
