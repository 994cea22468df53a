"""Database queries of the tuner and the server, one module per table or topic."""
