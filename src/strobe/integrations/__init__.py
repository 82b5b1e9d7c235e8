"""Ways into other libraries; each is a module of its own and none acts on import."""
