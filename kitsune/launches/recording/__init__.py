"""One step runs, and every launch of it is written down."""
