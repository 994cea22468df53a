"""The archive format of a submission: what it may contain, and how it is written and validated."""
