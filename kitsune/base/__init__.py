"""Helpers that depend on nothing else in Kitsune: environment variables, files, durations, logging, records."""
