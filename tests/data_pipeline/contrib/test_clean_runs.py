"""``bert-data clean``: the same bytes for any number of processes, sizes of jobs and Beam; kills; object stores."""

import random
from pathlib import Path

import pytest
from text_corpora import tree

from bert_jax.commands.data import main
from bert_jax.io.files import remove_tree
from bert_jax.io.storage import ObjectPath
from data_pipeline.build import token_store
from data_pipeline.contrib.clean import duplicates, job_table, scanning

WORDS = [f"w{number}" for number in range(300)]
OPTIONS = ["--encoding", "off", "--boilerplate", "4", "--near_duplicates", "0.6"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two texts in many chunks, with duplicates of all kinds across files."""
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 2000)
    draw = random.Random(5)
    documents: list[list[str]] = []
    for _ in range(60):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(draw.randint(2, 6))]
        documents += [["all rights are reserved", *lines] if draw.random() < 0.3 else lines]
        for _ in range(draw.choice((0, 0, 1, 3))):
            copy = list(lines)
            copy[draw.randrange(len(copy))] = " ".join(draw.choices(WORDS, k=3))
            documents.append(draw.choice((lines, copy)))
    draw.shuffle(documents)
    text = tmp_path / "text"
    text.mkdir()
    for number, part in enumerate((documents[:90], documents[90:], [["a b"]])):
        (text / f"{number}.txt").write_text("\n\n".join("\n".join(document) for document in part) + "\n")
    return tmp_path


def run(place: Path, output: object, *more: str) -> int:
    """Exit code of a small ``bert-data clean`` command."""
    words = ["--corpus", str(place / "text"), "--output", str(output), "--workers", "1", *OPTIONS, *more]
    return main(["clean", *words])


def test_lines_that_are_cut_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "text" / "1.txt").write_text("ok ok\n" + "w1 w2 " * 400_000 + "\n")
    assert run(place, place / "out") == 0
    assert "lines that are too long, cut into several documents: text/1.txt:2\n" in capsys.readouterr().out


def expected(place: Path) -> dict[str, bytes]:
    """The files of one process."""
    assert run(place, place / "one") == 0
    files = tree(place / "one")
    assert len(files) == 4 and all(len(content) > 500 for content in files.values())
    report = files["cleaned.json"].decode()
    assert all(f'"{rule}": {{\n   "documents": 0,\n   "lines": 0' not in report
               for rule in ("exact_duplicate", "boilerplate", "near_duplicate"))  # fmt: skip
    return files


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(place: Path, count: int) -> None:
    assert run(place, place / "many", "--workers", str(count)) == 0
    assert tree(place / "many") == expected(place)


@pytest.mark.slow
def test_beam(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three jobs scan each of the larger texts."""
    pytest.importorskip("apache_beam", reason="needs the extra beam")
    monkeypatch.setattr("data_pipeline.contrib.clean.beam._SHARE_BYTES", 1000)
    monkeypatch.setattr("data_pipeline.contrib.clean.beam._MOST_SHARES", 3)
    files = expected(place)
    capsys.readouterr()
    assert run(place, place / "beam", "--workers", "2", "--runner", "beam") == 0
    out, err = capsys.readouterr()
    assert tree(place / "beam") == files and "under Apache Beam" in out and err == ""


@pytest.mark.slow
def test_beam_loses_a_result(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("apache_beam", reason="needs the extra beam")
    from data_pipeline.contrib.clean import beam

    real = beam._Jobs.list_items
    monkeypatch.setattr(beam._Jobs, "list_items", lambda jobs, values: real(jobs, values)[values[0] == 1 :])
    assert run(place, place / "beam", "--runner", "beam") == 2
    error = capsys.readouterr().err
    assert "Beam returned only" in error and len(error.splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 2000)
    assert run(place, place / "beam", "--runner", "beam") == 0
    assert tree(place / "beam") == expected(place)


@pytest.mark.slow
def test_sizes_of_jobs_do_not_matter(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sets made again from the text, lines counted in many ranges, and a job per group."""
    files = expected(place)
    monkeypatch.setattr(duplicates, "_CACHE_BYTES", 1)
    monkeypatch.setattr(duplicates, "_SLICE_BYTES", 300)
    monkeypatch.setattr(duplicates, "_JOB_BYTES", 300)
    monkeypatch.setattr(scanning, "_RANGE_KEYS", 20)
    made = []
    real = duplicates._sets
    monkeypatch.setattr(duplicates, "_sets", lambda plan, docs: made.append(len(docs)) or real(plan, docs))
    duplicates._boilerplate.cache_clear()
    assert run(place, place / "small") == 0
    assert tree(place / "small") == files
    assert made.count(1) > 5


def test_chunks_do_not_matter_for_the_text(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = expected(place)
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1 << 20)
    assert run(place, place / "large") == 0
    assert tree(place / "large") == files


def test_finished_work_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = expected(place)
    made: list[str] = []

    def fail_after(count: int, stage: int) -> None:
        before = job_table.STAGES[stage]

        def job(folder, item):
            if len(made) >= count:
                raise OSError(28, "No space left on device")
            made.append(f"{before.name} {item}")
            before.job(folder, item)

        changed = (*job_table.STAGES[:stage], before._replace(job=job), *job_table.STAGES[stage + 1 :])
        monkeypatch.setattr("data_pipeline.contrib.clean.run.STAGES", changed)

    real = scanning.save_text
    for module in (scanning, duplicates):
        monkeypatch.setattr(
            module,
            "save_text",
            lambda path, docs: made.append(f"{path.parent.name} {path.name}") or real(path, docs),
        )
    fail_after(20, 1)
    assert run(place, place / "killed") == 2
    texts = [name for name in made if name.endswith(".txt")]
    assert {name.split()[0] for name in texts} == {"text", "kept"} and len(texts) == len(set(texts))
    made.clear()
    fail_after(10**6, 1)
    assert run(place, place / "killed") == 0
    again = [name for name in made if name.endswith(".txt")]
    assert again and not set(again) & set(texts) and not [name for name in again if name.startswith("text")]
    assert tree(place / "killed") == files


def test_changed_text_is_cleaned_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = (job_table.STAGES[0]._replace(items=lambda folder: 1 // 0),)
    monkeypatch.setattr("data_pipeline.contrib.clean.run.STAGES", failing)
    with pytest.raises(ZeroDivisionError):
        run(place, place / "again")
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 2000)
    (before,) = (place / "again").glob(".clean-*")
    (place / "text" / "0.txt").write_text("w1 w2 w3 w4 w5 w6\n")
    assert run(place, place / "again") == 0
    assert not before.exists()
    assert tree(place / "again") == expected_of_changed(place)


def expected_of_changed(place: Path) -> dict[str, bytes]:
    """The files of one process, of the text as it is now."""
    assert run(place, place / "fresh") == 0
    return tree(place / "fresh")


@pytest.mark.slow
def test_an_object_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, unfinished files and output in fsspec's ``memory://``, which stands for ``gs://``."""
    monkeypatch.setattr("tempfile.tempdir", str(place))
    files = expected(place)
    bucket = ObjectPath(f"memory://{place.name}")
    for file in (place / "text").iterdir():
        (bucket / "text" / file.name).upload(file)
    assert run(place, bucket / "out", "--corpus", f"{bucket}/text") == 0
    found = {str(path.relative_to(bucket / "out")): path.read_bytes() for path in (bucket / "out").rglob("[!.]*")}
    assert found == files
    remove_tree(bucket)
