"""The archive of a submission: what may stand in it, how it is written and read."""
