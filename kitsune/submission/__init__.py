"""Archives: the format of a submitted training step, its export and its rebuilding."""
