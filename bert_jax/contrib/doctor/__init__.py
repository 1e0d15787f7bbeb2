"""Checks of a pretraining run: its data, its log, its network and its objective."""

COMMANDS = {"doctor": "bert_jax.contrib.doctor.commands:COMMANDS"}
EXTENSIONS = {
    "PretrainRun.doctor": "bert_jax.contrib.doctor.examine:examine",
    "training.doctor": "bert_jax.contrib.doctor.in_training:Doctor",
    "report of the doctor": "bert_jax.contrib.doctor.findings:section",
}
