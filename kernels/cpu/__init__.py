"""The operators on a CPU: loops compiled by Numba, on threads of their own."""
