"""Plans: predicted memory, time and cost of training runs on hardware that need not be attached."""

COMMANDS = {"plan": "bert_jax.contrib.planner.commands:COMMANDS"}
