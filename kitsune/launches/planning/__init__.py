"""Schedules of launches on streams, and their memory plans. Pure functions: they know no device and load no torch."""
