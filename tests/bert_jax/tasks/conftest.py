"""Shared by the tests of fine-tuning runs."""

import pytest
from finetune_cases import saved_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A saved model to start from; no test writes into its folder."""
    return saved_model(tmp_path_factory.mktemp("models") / "model")
