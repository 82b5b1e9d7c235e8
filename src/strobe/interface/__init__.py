"""Signatures and docstrings of the public functions, one module a kind of call."""
