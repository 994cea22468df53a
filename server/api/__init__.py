"""The routes that answer programs with JSON."""
