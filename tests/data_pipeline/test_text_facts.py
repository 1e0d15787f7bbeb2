"""What a build says of its text: files, lines, unknown tokens, tokens in rows, pairs, merged characters."""

import json
from pathlib import Path

import numpy as np
import pytest
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import SPECIAL_PIECES
from data_pipeline.build.ensure import ensure_data
from data_pipeline.shards.shard_files import (
    read_index,
    read_manifest,
    read_records,
    write_index,
    write_manifest,
    write_records,
)
from data_pipeline.shards.tfexample import decode_example, encode_examples

GERMAN = "Der Käufer hört schöne Bücher für {}.\nEr mag die Häuser {} sehr.\nSie grüßt ihn {}.\n\n"
KOREAN = "나는 학교에 {} 간다.\n그는 집에 {} 있다.\n우리는 밥을 {} 먹는다.\n\n"
JAPANESE = "がくせいは {} がっこうへ いく。\nかれは {} ぼうしを かぶる。\n\n"
FRENCH = "Il a mange {} pommes.\nElle part {} fois.\nNous sommes {} ici.\n\n"  # without accents


def build(folder: Path, **changes: object) -> list[str]:
    values: dict[str, object] = {
        "corpus": (str(folder / "text"),), "shards": str(folder / "shards"), "seq_length": 32,
        "max_predictions": 5, "dupe_factor": 2, "num_shards": 1, "workers": 1,
    }  # fmt: skip
    lines: list[str] = []
    ensure_data(DataConfig(**(values | changes)), vocab_size=600, report=lines.append)  # type: ignore[arg-type]
    return lines


def write(folder: Path, text: str, documents: int = 12) -> None:
    (folder / "text").mkdir(exist_ok=True)
    content = "".join(text.format(*range(number, number + 3)) for number in range(documents))
    (folder / "text" / "a.txt").write_text(content)


def warned(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("WARNING:")]


@pytest.mark.slow
def test_numbers_are_those_of_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    write_corpus(tmp_path / "text" / "a.txt", 30)
    (tmp_path / "text" / "table.csv").write_text("a,b\n")
    vocab = str(write_vocab(tmp_path / "vocab.txt"))
    lines = build(tmp_path, vocab=vocab)
    (text,) = [line for line in lines if line.startswith("text: ")]
    assert "1 file read; skipped: 1" in text and ".csv" in text and text.endswith("each line is a sentence")
    folder = tmp_path / "shards" / "train"
    rows = [decode_example(r) for e in read_index(folder).entries for r in read_records(folder / e.name)]
    manifest = read_manifest(folder)
    assert manifest is not None
    counts = manifest["counts"]
    assert counts["predictions"] == sum(int(row["masked_lm_weights"].sum()) for row in rows)
    assert counts["pairs"] == sum(row["segment_ids"].any() for row in rows)
    labels = np.array([int(row["next_sentence_labels"][0]) for row in rows])
    assert counts["second_label"] == labels.sum()
    a = np.array([int(((row["segment_ids"] == 0) & (row["input_mask"] > 0)).sum()) - 2 for row in rows])
    b = np.array([int(row["segment_ids"].sum()) - 1 for row in rows])
    assert counts["tokens_in_rows"] == (a + b * (labels == 0)).sum()
    share = counts["tokens_in_rows"] / (2 * counts["tokens"])
    assert any(f"train: {share:.1%} of the tokens in rows, 0.00% [UNK]" in line for line in lines)
    assert len(lines) <= 12 and not warned(lines)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "shards"), "--vocab", vocab, "--examples", "0"]) == 0
    out = capsys.readouterr().out
    assert "1 file read; skipped: 1" in out and f"{share:.1%} of the tokens in rows" in out


@pytest.mark.slow
def test_shards_of_before_are_reported_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, FRENCH)
    build(tmp_path)
    before = tree(tmp_path / "shards")
    for split in ("train", "eval"):
        manifest = read_manifest(tmp_path / "shards" / split)
        assert manifest is not None
        del manifest["text"]
        for name in ("tokens_in_rows", "pairs", "second_label", "predictions"):
            del manifest["counts"][name]
        write_manifest(tmp_path / "shards" / split, manifest)
    assert build(tmp_path) == []
    assert main(["inspect", str(tmp_path / "shards")]) == 0
    out = capsys.readouterr().out
    assert "random next share" in out and "of the tokens in rows" not in out
    assert {name for name, data in tree(tmp_path / "shards").items() if data != before[name]} == {
        "train/manifest.json", "eval/manifest.json",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "shown"), [(GERMAN, "ö to o"), (JAPANESE, "が to か"), (KOREAN, "는 in 3 parts"), (FRENCH, "")]
)
def test_characters_that_lose_accents(tmp_path: Path, text: str, shown: str) -> None:
    write(tmp_path, text)
    found = [line for line in warned(build(tmp_path)) if "lose accents" in line]
    assert len(found) == (shown != "")
    if shown:
        assert shown in found[0] and "--data.strip_accents false keeps them" in found[0]
        more = {"strip_accents": "false", "shards": str(tmp_path / "kept")}
        assert not any("lose accents" in line for line in build(tmp_path, **more))


@pytest.mark.parametrize("case", ["uncased vocabulary", "cased vocabulary", "accents"])
def test_a_vocabulary_of_another_case(tmp_path: Path, case: str) -> None:
    write(tmp_path, GERMAN)
    made = {"lower_case": case == "uncased vocabulary", "strip_accents": "false" if case == "accents" else "auto"}
    made["lower_case"] = made["lower_case"] or case == "accents"
    build(tmp_path, **made)
    vocab = str(tmp_path / "shards" / "vocab.txt")
    same = build(tmp_path, vocab=vocab, shards=str(tmp_path / "same"), **made)
    assert not warned(same)
    other = {"lower_case": not made["lower_case"]} if case != "accents" else {"lower_case": True}
    lines = warned(build(tmp_path, vocab=vocab, shards=str(tmp_path / "other"), **other))
    remedy = {"uncased vocabulary": "--data.lower_case true", "cased vocabulary": "--data.lower_case false"}
    assert lines and all(remedy.get(case, "--data.strip_accents false") in line for line in lines)
    assert any("of the pieces have" in line for line in lines) == (case != "uncased vocabulary")


@pytest.mark.parametrize("known", ["der", "er sie ihn die für mag"])
def test_a_vocabulary_that_knows_hardly_anything_is_refused(tmp_path: Path, known: str) -> None:
    write(tmp_path, "Wort um Wort {} ganz ohne Sinn und Ziel.\nNoch {} Worte mehr darin.\nViel {} Text.\n\n")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_PIECES, *known.split()]) + "\n")
    with pytest.raises(ValueError, match=r"% of the tokens are \[UNK\], so nothing can be learned"):
        build(tmp_path, vocab=str(tmp_path / "vocab.txt"))
    assert not (tmp_path / "shards" / "store" / "store.json").exists()


@pytest.mark.parametrize("unit", ["whole_word", "span"])
def test_words_that_are_never_masked_are_refused(tmp_path: Path, unit: str) -> None:
    letters = np.random.default_rng(0).choice(list("acgt"), (40, 12))
    write(tmp_path, "", 0)
    lines = [" ".join("".join(row) for row in letters[i : i + 2]) for i in range(0, 40, 2)]
    (tmp_path / "text" / "a.txt").write_text("\n\n".join("\n".join(lines[i : i + 2]) for i in range(0, 20, 2)))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_PIECES, *"acgt", *(f"##{c}" for c in "acgt")]) + "\n")
    more = {"vocab": str(tmp_path / "vocab.txt"), "mask_unit": unit, "next_sentence": "none", "seq_length": 64}
    with pytest.raises(ValueError, match=rf"data\.mask_unit: with {unit}, no token is predicted, .*\(5\)"):
        build(tmp_path, **more)
    assert not (tmp_path / "shards" / "train").exists()
    build(tmp_path, **more | {"mask_unit": "token", "shards": str(tmp_path / "tokens")})


def test_documents_of_one_sentence_make_random_pairs(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    records = (json.dumps({"text": f"Ein Satz {number} allein steht hier"}) for number in range(40))
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(records))
    (line,) = warned(build(tmp_path))
    assert "100.0% of the pairs are random" in line and "--data.next_sentence none" in line
    assert not warned(build(tmp_path, next_sentence="none", shards=str(tmp_path / "one")))


@pytest.mark.parametrize("names", [("tokens", "labels"), ("image",)])
def test_records_of_another_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    records = encode_examples({name: np.ones((3, 2), np.int64) for name in names})
    write_index(tmp_path, [write_records(tmp_path / "a.tfrecord", records)])
    assert main(["inspect", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"the records have no input_ids; they contain {', '.join(sorted(names))};" in err
    assert len(err.splitlines()) == 1
