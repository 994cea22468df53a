"""The engine: a training step as launches that are prepared once and issued many times."""
