"""The life of a request, the fleet and placement: pure, no sockets."""
