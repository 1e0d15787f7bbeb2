"""Building under Apache Beam: the bytes of the process pool, in local folders and object stores; failures."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.io.files import remove_tree
from bert_jax.io.storage import ObjectPath
from data_pipeline.build import shard_jobs, token_store
from data_pipeline.contrib.beam import pipeline as beam_module

pytest.importorskip("apache_beam", reason="needs the extra beam")

REPOSITORY = Path(__file__).parents[3]
OPTIONS = [
    "--seq_length", "32", "--max_predictions", "5", "--dupe_factor", "2", "--num_shards", "3",
    "--eval_fraction", "0.1", "--workers", "2",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three texts, cut into many chunks and parts."""
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(shard_jobs, "PART_TOKENS", 800)
    text = tmp_path / "text"
    text.mkdir()
    write_corpus(text / "b.txt", 25, seed=1)
    (text / "a.txt.gz").write_bytes(gzip.compress(write_corpus(tmp_path / "a", 9, seed=2).read_bytes()))
    (text / "c.jsonl").write_text('{"text": "w1 w2 .\\nw3 ."}\n{"text": "?"}\n{"text": ""}\n')
    write_vocab(tmp_path / "vocab.txt")
    return tmp_path


def shards(place: Path, output: object, *more: str) -> list[str]:
    """A small ``bert-data shards`` command line."""
    corpus = ["--corpus", str(place / "text"), "--vocab", str(place / "vocab.txt")]
    return ["shards", *corpus, "--output", str(output), *OPTIONS, *more]


def pool(place: Path, *more: str) -> dict[str, bytes]:
    """What the process pool (of this process alone) builds."""
    assert main(shards(place, place / "pool", "--workers", "1", *more)) == 0
    return tree(place / "pool")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--masking", "dynamic", "--next_sentence", "sop", "--data.packing", "best_fit"]],
    ids=["nsp", "packed"],
)
def test_the_bytes_of_the_process_pool(place: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    expected = pool(place, *more)
    capsys.readouterr()
    assert main(shards(place, place / "beam", *more, "--runner", "beam")) == 0
    out, err = capsys.readouterr()
    assert tree(place / "beam") == expected and len(expected) > 8
    assert "under Apache Beam" in out and "in 3 shard(s)" in out and err == ""


@pytest.mark.slow
def test_two_worker_processes(place: Path) -> None:
    """Nothing but files and names passes between the steps."""
    corpus = ["--corpus", str(place / "text"), "--vocab", str(place / "vocab.txt"), *OPTIONS]
    processes = ["--runner", "beam", "--", "--direct_running_mode=multi_processing"]
    for name, more in (("pool", []), ("beam", processes)):
        words = [sys.executable, "-m", "bert_jax.commands.data", "shards", *corpus, "--output", name, *more]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        subprocess.run(words, cwd=place, env=environment, check=True, capture_output=True)
    assert tree(place / "beam") == tree(place / "pool")


@pytest.mark.slow
def test_finished_work_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pool(place)
    made: list[str] = []

    def fail_after(name: str, count: int) -> None:
        real = getattr(beam_module, name)

        def job(*arguments):
            target = next(str(a) for a in arguments if isinstance(a, Path | int))
            assert f"{name} {target}" not in made, f"{name} {target} was made again"
            if sum(one.startswith(name) for one in made) == count:
                raise OSError(28, "No space left on device")
            result = real(*arguments)
            made.append(f"{name} {target}")
            return result

        monkeypatch.setattr(beam_module, name, job)

    fail_after("tokenize_chunk", 3)
    # One thread, so that nothing runs on after the failure.
    words = shards(place, place / "beam", "--workers", "1", "--runner", "beam")
    assert main(words) == 2
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(shard_jobs, "PART_TOKENS", 800)
    fail_after("tokenize_chunk", 10**6)
    fail_after("write_part", 3)
    assert main(words) == 2
    assert len(made) > 6 and not (place / "beam" / "train").exists()
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(shard_jobs, "PART_TOKENS", 800)
    fail_after("write_part", 10**6)
    assert main(words) == 0
    assert tree(place / "beam") == expected


def test_an_object_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, token store, parts and shards in fsspec's ``memory://``, which stands for ``gs://``."""
    monkeypatch.setattr("tempfile.tempdir", str(place))
    expected = pool(place)
    bucket = ObjectPath(f"memory://{place.name}")
    for file in (place / "text").iterdir():
        (bucket / "text" / file.name).upload(file)
    (bucket / "vocab.txt").upload(place / "vocab.txt")
    for runner in ("beam", "processes"):
        places = ["--corpus", f"{bucket}/text", "--vocab", f"{bucket}/vocab.txt", "--workers", "1"]
        assert main(shards(place, bucket / runner, *places, "--runner", runner)) == 0
        folder = bucket / runner
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()
        }
        assert files == expected
        # All there: nothing is built again.
        assert main(shards(place, bucket / runner, *places, "--runner", runner)) == 0
    remove_tree(bucket)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"w1a .\nw1b .\n\nw2 \xff .\n", [], "b.txt:4: not valid UTF-8"),
        (b"w1a .\nw1b .\n", [], "blank lines"),
        (b"\n\n", [], "yields no token"),
        (b"w1 .\n", ["--", "--runner=NoRunner"], "the Beam pipeline failed: Unexpected pipeline runner: NoRunner"),
        (b"w1 .\n", ["--", "--fooo=1"], "after --: fooo is not an option of Apache Beam"),
        (b"w1 .\n", ["--", "--direct_num_workers=x"], "direct_num_workers: invalid int value: 'x'"),
    ],
)
def test_failures_are_one_line(
    place: Path, text: bytes, options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in (place / "text").iterdir():
        file.unlink()
    (place / "text" / "b.txt").write_bytes(text)
    assert main(shards(place, place / "beam", "--runner", "beam", *options)) == 2
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runner", "spark"], "--runner: invalid choice: 'spark' (choose from"),
        (["--", "--runner=SparkRunner"], "require --runner beam"),
    ],
)
def test_wrong_runners(place: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shards(place, place / "beam", *options)) == 2
    assert message in capsys.readouterr().err


def test_beam_is_not_installed(place: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert main(shards(place, place / "beam", "--runner", "beam")) == 2
    assert "pip install 'bert_jax[beam]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42)])
def test_a_signal_ends_it_and_the_next_build_goes_on(place: Path, number: signal.Signals, code: int) -> None:
    write_corpus(place / "text" / "b.txt", 300, 60)
    words = [sys.executable, "-m", "bert_jax.commands.data", *shards(place, place / "beam", "--dupe_factor", "8")]
    words += ["--runner", "beam"]
    process = subprocess.Popen(
        words, cwd=REPOSITORY, start_new_session=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not any((place / "beam").glob(".build-train-*/parts/*.table")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.02)
    os.killpg(process.pid, number)
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert time.monotonic() - began < 5
    assert process.returncode == code
    assert err == "stopped while preparing data; finished parts are kept: run the same command to continue\n"
    assert not (place / "beam" / "train").exists()


@pytest.mark.slow
def test_a_lost_result_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(beam_module._Jobs, "tokenize", lambda jobs, number: (0, 1))
    assert main(shards(place, place / "beam", "--runner", "beam")) == 2
    assert "Beam returned only 1 of 3 results" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(beam_module._Jobs, "write_part", lambda jobs, part: (part[0], 0))
    assert main(shards(place, place / "beam", "--runner", "beam")) == 2
    assert "Beam returned only 0 of" in capsys.readouterr().err
