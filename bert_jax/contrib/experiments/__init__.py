"""Tools for several runs: sweeps, comparisons, leaderboard files, a logger for Weights & Biases."""

COMMANDS = dict.fromkeys(
    ("compare", "benchmark-inference", "submission"), "bert_jax.contrib.experiments.commands:COMMANDS"
)
EXTENSIONS = {"report WORKDIR WORKDIR": "bert_jax.contrib.experiments.compare:compare"}
LOGGERS = {"wandb": "bert_jax.contrib.experiments.wandb_logger:WeightsAndBiases"}
FINETUNE_OPTIONS = {"sweep": "bert_jax.contrib.experiments.config:SweepOptions"}
