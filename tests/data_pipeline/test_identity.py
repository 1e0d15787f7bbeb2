"""Identity of a corpus: its content, which is read again only if a file has another size or time."""

import json
import os
from pathlib import Path

import pytest
from text_corpora import write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import ObjectPath
from data_pipeline.build import identity
from data_pipeline.build.ensure import ensure_data
from data_pipeline.build.identity import HASHES_NAME, file_settings
from data_pipeline.shards.shard_files import read_manifest, write_manifest


def build(folder: Path, **changes: object) -> None:
    values: dict[str, object] = {
        "corpus": (str(folder / "text"),), "vocab": str(folder / "vocab.txt"), "shards": str(folder / "shards"),
        "seq_length": 32, "max_predictions": 5, "dupe_factor": 1, "num_shards": 1, "workers": 1,
    }  # fmt: skip
    ensure_data(DataConfig(**(values | changes)), vocab_size=1000, report=lambda _: None)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(2):
        write_corpus(tmp_path / "text" / f"{number}.txt", documents=8, seed=number)
    write_vocab(tmp_path / "vocab.txt")
    return tmp_path


def edit(path: Path, *, keep_time: bool = False) -> None:
    """Replace a word, so that the size stays."""
    facts = path.stat()
    text = path.read_text()
    path.write_text(text.replace("w1", "w2", 1))
    assert path.stat().st_size == facts.st_size and path.read_text() != text
    if keep_time:
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.cases(1)
@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("vocab", ["given", "trained"])
def test_an_edited_file_of_the_same_size(place: Path, vocab: str, keep_time: bool) -> None:
    changes = {"vocab": ""} if vocab == "trained" else {}
    build(place, **changes)
    edit(place / "text" / "1.txt", keep_time=keep_time)
    owner = "vocabulary" if vocab == "trained" else "shards"
    with pytest.raises(ValueError, match=rf"data\.corpus content: {owner} text/1\.txt \w{{8}}, config text/1\.txt"):
        build(place, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", ["given", "trained"])
def test_an_encoding_that_is_no_longer_named(place: Path, vocab: str) -> None:
    changes = {"vocab": ""} if vocab == "trained" else {}
    build(place, encoding="latin-1", token_store=str(place / "store"), **changes)
    with pytest.raises(ValueError, match=r"data\.encoding: \w+ latin-1, config auto"):
        build(place, **changes)
    with pytest.raises(ValueError, match=r"data\.encoding: store latin-1, config auto"):
        build(place, token_store=str(place / "store"), shards=str(place / "others"), **changes)


def test_the_token_store_too(place: Path) -> None:
    build(place, token_store=str(place / "store"))
    edit(place / "text" / "0.txt")
    with pytest.raises(ValueError, match=r"data\.corpus content: store text/0\.txt"):
        build(place, token_store=str(place / "store"), shards=str(place / "others"))


def test_a_touched_file_is_no_change_and_unchanged_files_are_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(place)
    read: list[str] = []
    hashed = identity._hash
    monkeypatch.setattr(identity, "_hash", lambda path: read.append(path.name) or hashed(path))
    build(place)
    assert read == []
    os.utime(place / "text" / "1.txt")
    build(place)
    assert read == ["1.txt"]
    build(place)
    assert read == ["1.txt"]
    (place / "shards" / HASHES_NAME).unlink()
    build(place)
    assert sorted(read) == ["0.txt", "1.txt", "1.txt"]


@pytest.mark.slow
def test_folders_of_before_keep_their_identity(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They record names and sizes only, and no file is read."""
    build(place, vocab="")
    shards = place / "shards"
    for split in ("train", "eval"):
        manifest = read_manifest(shards / split)
        assert manifest is not None and str(place) not in json.dumps(manifest)
        del manifest["settings"]["data.corpus content"]
        write_manifest(shards / split, manifest)
    for path, keys in ((shards / "store/store.json", ["settings"]), (shards / "vocabulary.json", [])):
        record = json.loads(path.read_text())
        own = record
        for key in keys:
            own = own[key]
        del own["data.corpus content"]
        path.write_text(json.dumps(record))
    (shards / HASHES_NAME).unlink()
    monkeypatch.setattr(identity, "_hash", lambda path: pytest.fail("read"))
    build(place, vocab="")
    edit(place / "text" / "0.txt")
    build(place, vocab="")
    build(place, vocab=str(shards / "vocab.txt"), token_store=str(shards / "store"), shards=str(place / "more"))
    (place / "text" / "0.txt").write_text("w1 .\n")
    with pytest.raises(ValueError, match=r"data\.corpus: vocabulary 2 file"):
        build(place, vocab="")


def test_objects(tmp_path: Path) -> None:
    """Objects of equal content have the identity of files; a replaced one is read again."""
    bucket = ObjectPath(f"memory://{tmp_path.name}")
    (bucket / "a").write_bytes(b"one")
    (tmp_path / "a").write_bytes(b"one")
    first = file_settings("x", [("a", bucket / "a")], tmp_path)
    assert first == file_settings("x", [("a", tmp_path / "a")], tmp_path)
    (bucket / "a").write_bytes(b"two")
    assert file_settings("x", [("a", bucket / "a")], tmp_path, first)["x content"] != first["x content"]
    bucket.remove_tree()


@pytest.mark.slow
def test_cleaned_text_and_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one two three\n")
    clean = ["clean", "--corpus", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--encoding", "off"]
    page = "<page><title>A</title><ns>0</ns><revision><text>First.</text></revision></page>"
    (tmp_path / "d.xml").write_text(f"<mediawiki>{page}</mediawiki>")
    wiki = ["wikipedia", str(tmp_path / "d.xml"), "--output", str(tmp_path / "wiki"), "--workers", "1"]
    for command in (clean, wiki):
        assert main(command) == 0 and main(command) == 0
    assert "already cleaned" in (out := capsys.readouterr().out) and "nothing to do" in out
    (tmp_path / "a.txt").write_text("one two seven\n")
    (tmp_path / "d.xml").write_text(f"<mediawiki>{page}</mediawiki>".replace("First", "Third"))
    for command, message in ((clean, "data.corpus content"), (wiki, "was not made from these dumps")):
        assert main(command) == 2 and message in capsys.readouterr().err
