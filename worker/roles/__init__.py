"""The prefill and decode roles: the request handling of workers."""
