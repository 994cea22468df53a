"""From a live training step to an archive: no weights, no code."""
