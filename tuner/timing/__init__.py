"""Blocks of steps, timed side by side on a device."""
