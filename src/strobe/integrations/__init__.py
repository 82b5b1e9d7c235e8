"""Integrations with other libraries, one module each. Importing a module changes nothing in the other library."""
