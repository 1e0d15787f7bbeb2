"""Building: bytes that depend on nothing but text and settings, checks of existing shards."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import load_tokenizer
from data_pipeline.build import ensure as build_module
from data_pipeline.build import shard_jobs, shard_split
from data_pipeline.build.ensure import ensure_data
from data_pipeline.build.token_store import content_hash, held_out
from data_pipeline.build.vocabulary import held_documents, training_texts
from data_pipeline.build.workers import exclusive
from data_pipeline.shards.shard_files import read_index, read_manifest, read_records, write_records
from data_pipeline.shards.tfexample import decode_example
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents
from data_pipeline.text.vocabulary_training import train_vocabulary


def config(folder: Path, **changes: object) -> DataConfig:
    """A small build in ``folder``, whose corpus and vocabulary lie beside it."""
    parent = folder.parent
    values: dict[str, object] = {
        "corpus": (str(parent / "corpus.txt"),), "vocab": str(parent / "vocab.txt"), "shards": str(folder),
        "seq_length": 32, "max_predictions": 5, "dupe_factor": 2, "num_shards": 3, "eval_fraction": 0.2,
        "workers": 1,
    }  # fmt: skip
    return DataConfig(**(values | changes))  # type: ignore[arg-type]


def build(folder: Path, vocab_size: int = 1000, **changes: object) -> Path:
    ensure_data(config(folder, **changes), vocab_size=vocab_size, report=lambda _: None)
    return folder


def rows(folder: Path) -> list[dict[str, np.ndarray]]:
    return [decode_example(r) for e in read_index(folder).entries for r in read_records(folder / e.name)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.txt")
    write_vocab(tmp_path / "vocab.txt")
    return tmp_path / "shards"


def documents_of(row: dict[str, np.ndarray], segment: int) -> set[int]:
    """Documents that a segment's words name (made-up corpora), before masking."""
    ids = row["input_ids"].copy()
    used = row["masked_lm_weights"] > 0
    ids[row["masked_lm_positions"][used]] = row["masked_lm_ids"][used]
    inside = (row["input_mask"] > 0) & (row["segment_ids"] == segment)
    return {int(i) - 6 for i in ids[inside] if 6 <= i < 406}


@pytest.mark.slow
def test_negatives_and_held_out_text(place: Path) -> None:
    build(place, dupe_factor=3)
    seen: dict[str, set[int]] = {"train": set(), "eval": set()}
    randoms = 0
    for split, documents in seen.items():
        for row in rows(place / split):
            a, b = documents_of(row, 0), documents_of(row, 1)
            assert len(a) <= 1 and len(b) <= 1
            documents |= a | b
            if row["next_sentence_labels"][0]:
                assert not a & b
                randoms += 1
            else:
                assert len(a | b) <= 1
    assert randoms > 50
    assert seen["train"] and seen["eval"]
    assert not seen["train"] & seen["eval"]
    assert len(seen["train"] | seen["eval"]) == 40


def test_manifest_and_index_agree_with_the_shards(place: Path) -> None:
    build(place)
    manifest = read_manifest(place / "train")
    index = read_index(place / "train")
    assert manifest is not None
    assert manifest["tokenizer"] == load_tokenizer(place.parent / "vocab.txt").fingerprint
    assert manifest["counts"]["instances"] == index.records == len(rows(place / "train"))
    assert [s["crc32c"] for s in manifest["shards"]] == [e.crc32c for e in index.entries]
    assert manifest["settings"]["data.seq_length"] == 32
    assert str(place.parent) not in (place / "train" / "manifest.json").read_text()
    # Held-out text: one pass.
    counts = read_manifest(place / "eval")
    assert counts is not None and counts["settings"]["data.dupe_factor"] == 1
    assert not list(place.glob(".build-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="static"),
        pytest.param({"masking": "dynamic", "next_sentence": "sop"}, id="dynamic", marks=pytest.mark.slow),
    ],
)
def test_workers_do_not_change_a_byte(
    tmp_path: Path, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.build.token_store.CHUNK_CHARACTERS", 5000)
    monkeypatch.setattr("data_pipeline.build.shard_jobs.PART_TOKENS", 1000)
    write_corpus(tmp_path / "corpus.txt", documents=60)
    trees = [
        tree(build(tmp_path / f"workers{n}", vocab="", vocab_size=300, workers=n, **changes))
        for n in ((1, 2, 4) if changes else (1, 2))
    ]
    assert {"vocab.txt", "train/manifest.json", "train/records.index", "eval/records.index"} <= trees[0].keys()
    assert all(one == trees[0] for one in trees)


@pytest.mark.slow
def test_part_size_does_not_change_the_shards(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(place)
    monkeypatch.setattr("data_pipeline.build.shard_jobs.PART_TOKENS", 200)
    build(place.parent / "small_parts")
    # Only documents that share a place would swap; places are 64 bits.
    assert tree(place) == tree(place.parent / "small_parts")


@pytest.mark.slow
def test_passes_and_seeds_differ(place: Path) -> None:
    build(place, dupe_factor=2, eval_fraction=0.0)
    build(place.parent / "other", seed=1, eval_fraction=0.0)
    ids = [row["input_ids"].tobytes() for row in rows(place / "train")]
    assert len(set(ids)) > 0.95 * len(ids)
    others = {row["input_ids"].tobytes() for row in rows(place.parent / "other" / "train")}
    assert len(others & set(ids)) < 0.1 * len(ids)


def test_dynamic_shards_hold_unmasked_ids(place: Path) -> None:
    build(place, masking="dynamic", mask_unit="whole_word")
    tokenizer = load_tokenizer(place.parent / "vocab.txt")
    for row in rows(place / "train")[:50]:
        assert set(row) == {
        "input_ids", "input_mask", "segment_ids", "next_sentence_labels", "sequence_keys", "word_starts"
    }  # fmt: skip
        assert not (row["input_ids"] == tokenizer.mask_id).any()
        begins = row["word_starts"][row["input_mask"] > 0] > 0
        continues = tokenizer.continuation[row["input_ids"][row["input_mask"] > 0]]
        assert (begins | continues).all() and begins[0]


def test_store_is_shared_between_lengths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(place.parent / "store")
    build(place, token_store=store)
    before = {path: path.stat().st_mtime_ns for path in Path(store).iterdir()}
    monkeypatch.setattr(build_module, "build_store", lambda *_: pytest.fail("tokenized again"))
    build(place.parent / "long", token_store=store, seq_length=64)
    assert {path: path.stat().st_mtime_ns for path in Path(store).iterdir()} == before
    with pytest.raises(ValueError, match=r"data\.json_field: store text, config body.*data\.token_store"):
        build(place.parent / "third", token_store=store, json_field="body")


@pytest.mark.slow
def test_a_second_call_builds_nothing(place: Path) -> None:
    build(place, vocab="")
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    lines: list[str] = []
    ensure_data(config(place, vocab=""), vocab_size=1000, report=lines.append)
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()} == before
    # The text is not needed any more.
    (place.parent / "corpus.txt").unlink()
    ensure_data(config(place, vocab=""), vocab_size=1000, report=lines.append)


@pytest.mark.slow
def test_a_text_with_few_pieces(place: Path) -> None:
    lines: list[str] = []
    path = ensure_data(config(place, vocab=""), vocab_size=5000, report=lines.append)
    pieces = len(path.read_text().splitlines())
    assert pieces < 1000
    unused = f"the text yields {pieces:,} pieces; the other {5000 - pieces:,} word embeddings are never used"
    assert any(line.startswith(unused) for line in lines)


def test_the_segmenter_is_looked_for_before_the_vocabulary_is_trained(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)  # not installed
    lines: list[str] = []
    data = config(place, vocab="", mask_unit="whole_word", word_segmenter="jieba")
    with pytest.raises(ValueError, match=r"^data\.word_segmenter: jieba is not installed; run: pip install"):
        ensure_data(data, vocab_size=1000, report=lines.append)
    assert not any("vocabulary" in line for line in lines)


def test_vocabulary_is_trained_on_training_documents_only(place: Path) -> None:
    build(place, vocab="", vocab_size=300)
    data = config(place, vocab="")
    sources = list_sources(data.corpus)
    documents = list(read_documents(sources[0], line="auto", json_field="text"))
    held = held_out(np.array([content_hash(d) for d in documents], np.uint64), seed=data.seed, fraction=0.2)
    assert 0 < held.sum() < len(documents)
    texts = [sentence for d, is_held in zip(documents, held, strict=True) if not is_held for sentence in d]
    assert list(training_texts(data, sources, held_documents(data, sources))) == texts
    alone = train_vocabulary(
        texts, kind="wordpiece", vocab_size=300, lower_case=True, output=place.parent / "alone.txt"
    )
    assert alone.read_bytes() == (place / "vocab.txt").read_bytes()
    # The token store splits at the same place.
    manifest = read_manifest(place / "eval")
    assert manifest is not None and manifest["counts"]["documents"] == held.sum()


# ------------------------------------------------------------------ checks


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small build, which no test changes."""
    folder = tmp_path_factory.mktemp("built")
    write_corpus(folder / "corpus.txt")
    write_vocab(folder / "vocab.txt")
    return build(folder / "shards")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 64}, "data.seq_length: shards 32, config 64"),
        ({"masking": "dynamic"}, "data.masking: shards static, config dynamic"),
        ({"mask_unit": "whole_word"}, "data.mask_unit: shards token, config whole_word"),
        ({"max_predictions": 6}, "data.max_predictions: shards 5, config 6"),
        ({"next_sentence": "sop"}, "data.next_sentence: shards nsp, config sop"),
        ({"lower_case": False}, "vocabulary: shards"),
        ({"dupe_factor": 3, "seed": 1}, "data.dupe_factor: shards 2, config 3, data.seed: shards 12345, config 1"),
    ],
)
def test_other_settings_are_refused(built: Path, change: dict[str, object], message: str) -> None:
    before = tree(built)
    with pytest.raises(ValueError) as raised:
        build(built, **change)
    assert message in str(raised.value)
    assert "set them back, or name another folder" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert tree(built) == before


def test_another_corpus_is_refused(place: Path) -> None:
    build(place)
    write_corpus(place.parent / "corpus.txt", documents=50)
    with pytest.raises(ValueError, match=r"data\.corpus: shards 1 file\(s\), first .* config 1 file\(s\)"):
        build(place)


@pytest.mark.slow
def test_trained_vocabulary_with_other_settings_is_refused(place: Path) -> None:
    build(place, vocab="", vocab_size=300)
    with pytest.raises(ValueError, match=r"model\.vocab_size: vocabulary 300, config 301"):
        build(place, vocab="", vocab_size=301)


@pytest.mark.slow
def test_a_vocabulary_trained_on_another_text_is_refused(place: Path) -> None:
    """Also when nothing else is there that was made from the text."""
    build(place, vocab="", vocab_size=300)
    vocabulary = (place / "vocab.txt").read_bytes()
    for name in ("store", "train", "eval"):
        shutil.rmtree(place / name)
    other = str(write_corpus(place.parent / "other.txt", documents=50))
    with pytest.raises(
        ValueError, match=r"data\.corpus: vocabulary 1 file\(s\), first corpus\.txt.* first other\.txt"
    ) as raised:
        build(place, vocab="", vocab_size=300, corpus=(other,))
    assert "\n" not in str(raised.value) and "data.vocab" in str(raised.value)
    with pytest.raises(ValueError, match=r"data\.line: vocabulary auto, config sentence"):
        build(place, vocab="", vocab_size=300, line="sentence")
    assert str(place.parent) not in (place / "vocabulary.json").read_text()
    # Records of before say nothing of the text; a named vocabulary may be of any.
    record = json.loads((place / "vocabulary.json").read_text())
    for name in ("data.corpus", "data.line", "data.json_field"):
        del record[name]
    (place / "vocabulary.json").write_text(json.dumps(record))
    build(place, vocab="", vocab_size=300, corpus=(other,))
    assert (place / "vocab.txt").read_bytes() == vocabulary


def test_vocabulary_larger_than_the_model(place: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size: 100 is less than the 416 pieces"):
        build(place, vocab_size=100)


def test_one_document(place: Path) -> None:
    (place.parent / "corpus.txt").write_text("w1a .\nw1b .\nw1c .\n")
    for fraction in (0.2, 0.0):
        with pytest.raises(ValueError, match=r"nsp .* of 1 document.*blank lines.*sop or none"):
            build(place, eval_fraction=fraction)
    with pytest.raises(ValueError, match=r"0\.2 of 1 document.*--data\.eval_fraction 0"):
        build(place, next_sentence="sop")
    build(place, next_sentence="sop", eval_fraction=0.0)
    assert len(rows(place / "train")) == 2


def test_duplicates_of_one_document_are_no_negatives(place: Path) -> None:
    (place.parent / "corpus.txt").write_text("w1a .\nw1b .\n\n" * 6)
    with pytest.raises(ValueError, match=r"train.* 1 of 6 document"):
        build(place, eval_fraction=0.0)


def test_external_shards(place: Path) -> None:
    build(place)
    external = place.parent / "external"
    external.mkdir()
    records = [r for e in read_index(place / "train").entries for r in read_records(place / "train" / e.name)]
    write_records(external / "part.tfrecord", records)
    with pytest.raises(ValueError, match=f"bert-data index {external}"):
        build(external)
    from data_pipeline.shards.shard_files import index_folder

    index_folder(external)
    lines: list[str] = []
    path = ensure_data(config(external, corpus=()), vocab_size=1000, report=lines.append)
    assert path == place.parent / "vocab.txt" and lines == []
    for change, message in [
        ({"seq_length": 64}, "input_ids has 32 values .* data.seq_length 64"),
        ({"max_predictions": 20}, "has 5 values .* data.max_predictions 20"),
        ({"masking": "dynamic"}, "data.masking: dynamic"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(external, **change)
    write_vocab(place.parent / "vocab.txt", words=20)
    with pytest.raises(ValueError, match=r"input_ids from 0 to \d+ instead of 0 to 35"):
        build(external)


def test_no_folder_and_no_corpus(place: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.shards"):
        ensure_data(DataConfig(), vocab_size=100, report=lambda _: None)
    with pytest.raises(ValueError, match="corpus"):
        build(place, corpus=())


def test_two_builds_in_one_folder(place: Path) -> None:
    with exclusive(place), pytest.raises(ValueError, match="another process is building here"):
        build(place)


@pytest.mark.parametrize(("module", "name"), [(shard_split, "write_part"), (shard_jobs, "write_records")])
def test_finished_work_is_kept(place: Path, module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_jobs, "PART_TOKENS", 500)
    build(place.parent / "whole", eval_fraction=0.0)
    real = getattr(module, name)
    made: list[str] = []

    def working(*arguments: Any) -> Any:
        target = next(a for a in arguments if isinstance(a, Path)).name
        assert target not in made, f"{target} was made again"
        if len(made) == 2:
            made.append("broken")
            raise OSError("the power is gone")
        result = real(*arguments)
        made.append(target)
        return result

    monkeypatch.setattr(module, name, working)
    with pytest.raises(OSError, match="power"):
        build(place, eval_fraction=0.0)
    assert not (place / "train").exists()
    build(place, eval_fraction=0.0)
    assert len(made) > 3
    assert tree(place) == tree(place.parent / "whole")
