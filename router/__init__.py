"""Ingress and placement: HTTP and raw TCP in, frames to the workers out."""
