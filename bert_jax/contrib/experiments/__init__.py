"""Tools for several runs: sweeps, comparisons, leaderboard files."""

COMMANDS = dict.fromkeys(
    ("compare", "benchmark-inference", "submission"), "bert_jax.contrib.experiments.commands:COMMANDS"
)
FINETUNE_OPTIONS = {"sweep": "bert_jax.contrib.experiments.config:SweepOptions"}
