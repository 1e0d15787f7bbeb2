"""Readers and writers of model formats. They share one in-memory form, ``exchange.ModelBundle``."""
