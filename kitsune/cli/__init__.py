"""The `kitsune` command line: commands, output, exit codes, signals and the doctor."""
