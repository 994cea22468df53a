"""Suites that measure Kitsune against stock torch and write result files."""
