"""The processes of a run: start-up, signals, peers, exit codes."""
