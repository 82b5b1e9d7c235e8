"""Attention under other libraries' names: what the stand-ins share, and the integrations themselves."""
