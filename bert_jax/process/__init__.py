"""The processes of a run: start-up, signals, heartbeats, exit codes."""
