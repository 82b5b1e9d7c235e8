"""From a Problem to a launch."""
