"""A run on the terminal: progress, tables, sentences."""
