"""What the tuner remembers, in SQLite or PostgreSQL."""
