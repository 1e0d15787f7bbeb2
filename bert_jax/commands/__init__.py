"""The ``bert-jax`` command."""
