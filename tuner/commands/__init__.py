"""The commands of `kitsune`, one module each."""
