"""The operators on a CPU: loops compiled by Numba that run on their own threads."""
