"""Tools for several runs: sweeps, comparisons, leaderboard files."""
