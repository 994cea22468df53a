"""Rebuilds a training step from an archive."""
