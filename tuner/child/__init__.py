"""The measuring process."""
