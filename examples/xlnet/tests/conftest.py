"""The package as pip installs it: its entry points are those of pyproject.toml."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parents[1]
sys.path.insert(0, str(PACKAGE))


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with the description of the installed package; also on the path of this process."""
    from bert_jax import registry

    place = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    information = place / f"{project['name']}-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    before, path = sys.path[:], os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(place))
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, (PACKAGE, place, REPOSITORY)), *filter(None, [path])])
    registry.names.cache_clear()
    yield place
    sys.path[:] = before
    os.environ["PYTHONPATH"] = path
    registry.names.cache_clear()
