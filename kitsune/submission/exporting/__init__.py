"""Exports a training step to an archive, without weights and code."""
