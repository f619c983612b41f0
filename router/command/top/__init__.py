"""`baton top`: the cluster in a terminal, once a second."""
