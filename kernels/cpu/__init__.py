"""The operators on a CPU: loops compiled by Numba, run by a few threads of their own."""
