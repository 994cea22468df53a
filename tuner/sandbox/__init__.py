"""Confinement of measuring processes: environment variables, network, memory."""
