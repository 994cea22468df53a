"""The command line: words in, an exit code out."""
