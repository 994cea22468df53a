"""The search space of configurations, and the strategy that picks the next one to try. Pure functions."""
