"""The `wavecore` command and its subcommands. Knows flags, files and the terminal; leaves requests to `LLM`."""
