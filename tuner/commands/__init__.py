"""One file a command of `kitsune`."""
