"""Kernel selection for a Problem, and the caches of selections and launches."""
