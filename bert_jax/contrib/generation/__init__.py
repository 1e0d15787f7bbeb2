"""Continuations of texts by causal language models, token by token with a cache of keys and values."""

COMMANDS = {"generate": "bert_jax.contrib.generation.commands:COMMANDS"}
