"""Tools for several runs: sweeps, comparisons, leaderboard files."""

COMMANDS = dict.fromkeys(
    ("compare", "benchmark-inference", "submission"), "bert_jax.contrib.experiments.commands:COMMANDS"
)
EXTENSIONS = {"finetune --sweep": "bert_jax.contrib.experiments.sweep:run_sweep"}
