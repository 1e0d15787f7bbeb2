"""Several runs: sweeps, comparisons, leaderboard files."""
