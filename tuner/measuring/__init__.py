"""The tuner's side of measuring processes: start them, enforce limits, read their messages, kill them."""
