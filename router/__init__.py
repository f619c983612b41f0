"""The router: accepts requests over HTTP and raw TCP, and places them on workers."""
