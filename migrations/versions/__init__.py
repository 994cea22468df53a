"""One file a revision, in order; a published one is never edited."""
