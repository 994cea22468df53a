"""Data types for a recorded step: its launches, what they read and write, and the state that the step changes."""
