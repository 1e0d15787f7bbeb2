"""Probabilities of a trained classifier: a temperature, and class frequencies other than those of training."""

COMMANDS = {"calibrate": "bert_jax.contrib.calibration.commands:COMMANDS"}
