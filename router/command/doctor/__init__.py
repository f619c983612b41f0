"""`baton doctor`: checks a machine before a start, and a running cluster."""
