"""View models: pure functions that turn records into plain data for the templates."""
