"""What every request passes: guard, authentication, limits, problems, metrics."""
