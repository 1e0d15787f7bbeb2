"""Readers and writers of model formats. All of them use one in-memory form, ``exchange.ModelBundle``."""
