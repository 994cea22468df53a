"""The code that runs in a measuring process."""
