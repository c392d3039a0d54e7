"""The `wavecore` command and its subcommands."""
