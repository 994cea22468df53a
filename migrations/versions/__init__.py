"""Schema revisions in order, one per file. A published revision is never edited."""
