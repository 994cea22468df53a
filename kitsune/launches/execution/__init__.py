"""Recorded launches, issued again on a device: timed, compared with the step, raced against other plans."""
