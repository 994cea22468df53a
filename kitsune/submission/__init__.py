"""A model as data: the archive format, its export and its rebuilding."""
