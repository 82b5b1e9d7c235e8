"""strobe inside other libraries, each switched on by a call of its own; importing one of these changes nothing."""
