"""Accents and case through vocabulary, shards and their checks, and a WordPiece in a tokenizer.json."""

import json
from pathlib import Path

import pytest

from bert_jax.commands.data import main
from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import Tokenizer, load_tokenizer
from data_pipeline.build.ensure import ensure_data
from data_pipeline.shards.shard_files import read_index, read_manifest, read_records
from data_pipeline.shards.tfexample import decode_example

GERMAN = "Schöne Häuser für Käufer.\nEr hat schon Bücher gekauft.\n\n"
VIETNAMESE = "Má mà mả mã mạ.\nBà bán bánh mì ngon.\n\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(text.replace(".", f" {number}.") for number in range(8)))
    return path


def build(folder: Path, **changes: object) -> Tokenizer:
    values: dict[str, object] = {
        "corpus": (str(folder / "text.txt"),), "shards": str(folder / "shards"), "seq_length": 32,
        "max_predictions": 5, "dupe_factor": 1, "num_shards": 1, "workers": 1,
    }  # fmt: skip
    data = DataConfig(**(values | changes))  # type: ignore[arg-type]
    vocabulary = ensure_data(data, vocab_size=300, report=lambda _: None)
    return load_tokenizer(vocabulary, **data.rules)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("text", "word", "plain"), [(GERMAN, "schöne", "schone"), (VIETNAMESE, "mạ", "ma")])
@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_accents_are_kept_in_lower_case(tmp_path: Path, text: str, word: str, plain: str, kind: str) -> None:
    write(tmp_path, text)
    changes = {"tokenizer": kind, "strip_accents": "false"}
    tokenizer = build(tmp_path, **changes)
    assert tokenizer.decode(tokenizer.encode(word.upper())) == word
    assert tokenizer.encode(word) != tokenizer.encode(plain)
    manifest = read_manifest(tmp_path / "shards" / "train")
    assert manifest is not None and manifest["tokenizer"] == tokenizer.fingerprint
    texts = set()
    for entry in read_index(tmp_path / "shards" / "train").entries:
        for record in read_records(tmp_path / "shards" / "train" / entry.name):
            row = decode_example(record)
            ids = row["input_ids"]
            ids[row["masked_lm_positions"]] = row["masked_lm_ids"]
            texts.update(tokenizer.decode(ids.tolist()).split())
    assert word in texts and plain not in texts
    # Shards and vocabularies with and without accents are not mixed.
    with pytest.raises(ValueError, match=r"data\.strip_accents: vocabulary False, config True"):
        build(tmp_path, tokenizer=kind)
    with pytest.raises(ValueError, match=r"vocabulary: shards .*, config"):
        build(tmp_path, vocab=str(tmp_path / "shards" / "vocab.txt"))


@pytest.mark.slow
def test_vocabularies_of_before_strip_accents_as_their_case_says(tmp_path: Path) -> None:
    write(tmp_path, GERMAN)
    build(tmp_path, lower_case=True)
    path = tmp_path / "shards" / "vocabulary.json"
    record = json.loads(path.read_text())
    del record["data.strip_accents"]
    path.write_text(json.dumps(record))
    build(tmp_path, strip_accents="true")
    with pytest.raises(ValueError, match=r"data\.strip_accents: vocabulary True, config False"):
        build(tmp_path, strip_accents="false")


def test_a_vocabulary_command(tmp_path: Path) -> None:
    path = write(tmp_path, VIETNAMESE)
    words = ["vocab", "--corpus", str(path), "--vocab_size", "200", "--output", str(tmp_path / "v.txt")]
    assert main([*words, "--strip_accents", "false"]) == 0
    assert "ạ" in (tmp_path / "v.txt").read_text() and "M" not in (tmp_path / "v.txt").read_text().split()


def test_sentencepiece_keeps_accents(tmp_path: Path) -> None:
    write(tmp_path, GERMAN)
    with pytest.raises(
        ValueError, match=r"data\.strip_accents: 'true' .*auto or false with data\.tokenizer unigram"
    ):
        build(tmp_path, tokenizer="unigram", strip_accents="true")


@pytest.mark.parametrize("lower_case", [True, False])
def test_shards_of_a_tokenizer_json(tmp_path: Path, lower_case: bool) -> None:
    """The rules of the file apply, whatever data.lower_case is."""
    from tokenizers import BertWordPieceTokenizer

    path = write(tmp_path, GERMAN)
    trained = BertWordPieceTokenizer(lowercase=lower_case, strip_accents=False)
    trained.train([str(path)], vocab_size=120, show_progress=False)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build(tmp_path, vocab=str(tmp_path / "tokenizer.json"), lower_case=not lower_case)
    assert tokenizer.kind == "wordpiece" and tokenizer.lower_case == lower_case
    for text in ("Schöne HÄUSER, 中国 für 7 Käufer!", "Er\thatte\u00a0schon"):
        assert tokenizer.encode(text) == trained.encode(text, add_special_tokens=False).ids
    manifest = read_manifest(tmp_path / "shards" / "train")
    assert manifest is not None and manifest["tokenizer"] == tokenizer.fingerprint
    with pytest.raises(ValueError, match=r"data\.strip_accents: false is not allowed with tokenizer\.json"):
        build(tmp_path, vocab=str(tmp_path / "tokenizer.json"), strip_accents="false")
