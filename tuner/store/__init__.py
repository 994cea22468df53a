"""The database of the tuner, in SQLite or PostgreSQL."""
