"""A recording to another one of the same step, with more room for streams."""
