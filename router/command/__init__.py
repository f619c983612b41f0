"""The command `baton`: serves a model, talks to it, and looks after a cluster."""
