"""Measuring processes, as the tuner sees them: started, bounded, killed, read."""
