"""Terminal output of runs: progress, tables and messages."""
