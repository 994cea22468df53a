"""One tuning run, from a first look to a confirmed plan."""
