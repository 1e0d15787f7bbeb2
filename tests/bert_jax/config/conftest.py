"""Fixtures of tests of configs."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Relative file names keep the messages short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
