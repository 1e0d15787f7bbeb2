"""Shared by the tests of fine-tuning runs."""

import pytest
from finetune_cases import TWO_LAYERS, saved_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A saved model to start from; no test writes into its folder."""
    return saved_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory):
    """The same of two layers, for what tells layers apart."""
    return saved_model(tmp_path_factory.mktemp("models") / "model", model=TWO_LAYERS)
