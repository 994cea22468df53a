"""What needs nothing else of Kitsune: the environment, files, durations, log lines, records."""
