"""The space of configurations, and the order in which it is tried. Pure."""
