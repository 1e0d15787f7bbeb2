"""Readers and writers of model formats. They share one in-memory form, ``model_bundle.ModelBundle``."""
