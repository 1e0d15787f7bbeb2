"""Folders that cannot be one, named before anything is written."""

import pytest

from bert_jax.io.files import require_folder, whole_file
from bert_jax.io.folder_lock import hold_folder


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("file", "file: a file, not a folder"),
        ("file/run", "file: a file, not a folder"),
        ("dangling", "dangling: a dangling link"),
        ("dangling/a/b", "dangling: a dangling link"),
    ],
)
def test_what_cannot_be_a_folder_is_refused_in_one_line(place, name, fault):
    with pytest.raises(ValueError, match=rf"^--workdir: {place}/{fault}; \S*"):
        require_folder(place / name, "--workdir: ")
    with pytest.raises(ValueError, match=fault), hold_folder(place / name, "taken"):
        pass


def test_what_can_be_a_folder(place):
    for name in ("folder", "folder/new/run", "link", "link/run", "new"):
        require_folder(place / name)
    with pytest.raises(ValueError, match="file: a file, not a folder"), whole_file(place / "file" / "x"):
        pass
