"""One file a table: the questions that the tuner and the server ask the database."""
