"""Schema migrations of the store, run by Alembic through `tuner/store/migrate.py`."""
