"""Parts outside the project, as pip installs them, and a fresh registry for each test."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from bert_jax import registry

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture(autouse=True)
def fresh():
    """No part that a test adds is known to the next one."""
    registry.names.cache_clear()
    yield
    registry._ADDED.clear()
    registry.names.cache_clear()


def install(place: Path, file: Path, points: Mapping[str, str]) -> Path:
    """Install ``file`` in ``place`` as a package with the entry points ``points``, group -> NAME = TARGET, and
    return ``place``, a folder for sys.path."""
    information = place / "others-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(file, place)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = [f"[bert_jax.{group}]\n{point}\n" for group, point in points.items()]
    (information / "entry_points.txt").write_text("".join(lines))
    return place
