"""The bert-data command line: what it makes, what it shows, and one line with code 2 for every mistake."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.tokenization import SPECIAL_PIECES, load_tokenizer
from data_pipeline.shards.shard_files import read_index, read_manifest, read_records, write_records

SMALL = [
    "--seq_length",
    "32",
    "--max_predictions",
    "5",
    "--dupe_factor",
    "2",
    "--num_shards",
    "2",
    "--workers",
    "1",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.txt")
    write_vocab(tmp_path / "vocab.txt")
    return tmp_path


def shards(place: Path, *more: str) -> list[str]:
    """A small ``bert-data shards`` command line in ``place``."""
    return [
        "shards", "--corpus", str(place / "corpus.txt"), "--vocab", str(place / "vocab.txt"),
        "--output", str(place / "shards"), *SMALL, *more,
    ]  # fmt: skip


def fails(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line that ``argv`` ends with, code 2 checked."""
    capsys.readouterr()
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# ------------------------------------------------------------------ commands


def test_recipe_and_flags_give_the_same_shards(place: Path) -> None:
    recipe = place / "recipe.yaml"
    recipe.write_text(
        f"model:\n  hidden_size: 64\n  num_attention_heads: 2\ndata:\n  corpus: [{place}/corpus.txt]\n"
        f"  vocab: {place}/vocab.txt\n  shards: {place}/from_recipe\n  seq_length: 32\n  max_predictions: 5\n"
        "  dupe_factor: 2\n  num_shards: 2\n"
    )
    assert main(["shards", "--config", str(recipe), "--workers", "1"]) == 0
    assert main(shards(place)) == 0
    assert tree(place / "from_recipe") == tree(place / "shards")


def test_vocab(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["vocab", "--corpus", str(place / "corpus.txt"), "--vocab_size", "200"]
    assert main([*base, "--kind", "wordpiece", "--output", str(place / "new" / "a.txt")]) == 0
    assert main([*base, "--output", str(place / "b.txt")]) == 0
    assert (place / "b.txt").read_bytes() == (place / "new" / "a.txt").read_bytes()
    assert len((place / "b.txt").read_text().splitlines()) <= 200
    assert main([*base, "--shards", str(place / "shards")]) == 0
    assert (place / "shards" / "vocab.txt").read_bytes() == (place / "b.txt").read_bytes()
    # The place of the recipe's shards: not trained again, not with other settings.
    capsys.readouterr()
    assert main([*base, "--shards", str(place / "shards")]) == 0
    assert "training" not in capsys.readouterr().out
    assert "model.vocab_size: vocabulary 200, config 300" in fails(
        capsys, ["vocab", "--shards", str(place / "shards"), "--vocab_size", "300"]
    )
    assert "--output FILE" in fails(capsys, base)
    assert main([*base, "--output", str(place / "b.txt" / "v.txt")]) == 2
    captured = capsys.readouterr()
    assert "b.txt" in captured.err and "training" not in captured.out  # before hours of work


def test_vocab_warns_if_much_of_the_text_is_held_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    languages = place / "languages"  # each file is one document
    languages.mkdir()
    (languages / "de.txt").write_text("der kleine hund schläft .\n" * 40, encoding="utf-8")
    (languages / "en.txt").write_text("the small dog is sleeping .\n" * 40, encoding="utf-8")
    base = ["vocab", "--corpus", str(languages), "--vocab_size", "90", "--output", str(place / "joint.txt")]
    assert main(base) == 0
    warning = "\nWARNING: 1 of 2 documents are held out, and the vocabulary does not contain their words; set "
    assert warning in capsys.readouterr().out
    assert main([*base, "--eval_fraction", "0"]) == 0
    assert "held out" not in capsys.readouterr().out
    assert {"hund", "dog"} <= {*(place / "joint.txt").read_text(encoding="utf-8").split()}


def test_vocab_says_how_much_of_the_text_is_unknown(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = place / "rare.txt"
    letters = [chr(0x4E00 + number) for number in range(90)]
    text.write_text("".join(f"the cat sat {letter}\n\n" for letter in letters), encoding="utf-8")
    base = ["vocab", "--corpus", str(text), "--eval_fraction", "0", "--vocab_size"]
    assert main([*base, "200", "--output", str(place / "large.txt")]) == 0
    assert "\n0.00% of the tokens of the training text are [UNK]\n" in capsys.readouterr().out
    assert main([*base, "30", "--output", str(place / "small.txt")]) == 0
    text_of = r"\nWARNING: ([\d.]+)% of the tokens of the training text are \[UNK\]; use a larger --vocab_size\n"
    warning = re.search(text_of, capsys.readouterr().out)
    pieces = (place / "small.txt").read_text(encoding="utf-8").split()
    unknown = sum(letter not in pieces for letter in letters)
    tokens = len(load_tokenizer(place / "small.txt").encode_flat([text.read_text(encoding="utf-8")])[0])
    assert warning and unknown > 50 and float(warning[1]) == round(100 * unknown / tokens, 1)
    assert main([*base, "200", "--shards", str(place / "own")]) == 0
    assert "[UNK]" in capsys.readouterr().out


def test_unigram_vocabulary_and_shards(place: Path) -> None:
    assert main([*shards(place), "--vocab", "", "--kind", "unigram", "--vocab_size", "60"]) == 0
    manifest = read_manifest(place / "shards" / "train")
    assert manifest is not None and manifest["vocab_size"] <= 60
    assert (place / "shards" / "tokenizer.model").is_file()


def test_index(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shards(place)) == 0
    entry = read_index(place / "shards" / "train").entries[0]
    foreign = place / "foreign"
    foreign.mkdir()
    write_records(foreign / "a.tfrecord", read_records(place / "shards" / "train" / entry.name))
    assert "bert-data index" in fails(capsys, ["inspect", str(foreign)])
    assert main(["index", str(foreign)]) == 0
    assert f"indexed {entry.records:,} records in 1 shard(s)" in capsys.readouterr().out
    assert read_index(foreign).records == entry.records


def facts(text: str) -> dict[str, str]:
    """The report's lines as name -> value; the first split of several."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        found.setdefault(line[:22].strip(), line[22:].strip())
    return found


@pytest.mark.slow
def test_inspect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = place / "corpus.txt"
    blocks = corpus.read_text().split("\n\n")
    corpus.write_text("\n\n".join([*blocks, blocks[3].strip(), blocks[3].strip()]))
    assert main(shards(place, "--eval_fraction", "0.05")) == 0
    capsys.readouterr()
    assert main(["inspect", str(place / "shards"), "--vocab", str(place / "vocab.txt"), "--examples", "2"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" not in out  # no colours where there is no terminal
    train, evaluation = out.split(f"{place}/shards/eval")
    found = facts(train)
    index = read_index(place / "shards" / "train")
    assert found["records"].startswith(f"{index.records:,} in 2 shard(s)")
    duplicates = [int(facts(part)["documents"].rpartition(" ")[2]) for part in (train, "x" * 30 + evaluation)]
    assert sorted(duplicates) == [0, 2]
    assert found["passes"] == "2"
    assert found["ids out of range"].startswith("0 ")
    shares = dict(part.rsplit(" ", 1) for part in found["masking shares"].split(", "))
    assert sum(map(float, shares.values())) == pytest.approx(1, abs=2e-4)
    assert 0.7 < float(shares["[MASK]"]) < 0.9
    assert 0.5 < float(found["random next share"].split()[0]) < 0.8
    assert 0.4 < float(found["tokens per record"].rpartition(" ")[2]) <= 1
    examples = [line for line in train.splitlines() if "[CLS]" in line]
    assert len(examples) == 2 and all("«" in line for line in examples)
    bars = [line for line in train.splitlines() if line.startswith("length")]
    assert sum(int(line.split()[4].replace(",", "")) for line in bars) == index.records


def test_inspect_in_colour(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(shards(place)) == 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    capsys.readouterr()
    assert main(["inspect", str(place / "shards"), "--vocab", str(place / "vocab.txt")]) == 0
    assert "\x1b[1;32m«" in capsys.readouterr().out


def test_inspect_counts_ids_out_of_range(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shards(place)) == 0
    write_vocab(place / "short.txt", words=30)
    train = place / "shards" / "train"
    (train / "manifest.json").unlink()
    capsys.readouterr()
    assert main(["inspect", str(train), "--vocab", str(place / "short.txt")]) == 0
    assert int(facts(capsys.readouterr().out)["ids out of range"].split()[0].replace(",", "")) > 100


def test_inspect_finds_damage(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shards(place)) == 0
    shard = next((place / "shards" / "train").glob("shard-00000*"))
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)
    assert "record 0" in fails(capsys, ["inspect", str(place / "shards"), "--vocab", str(place / "vocab.txt")])


def test_chinese_whole_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jieba")
    sentences = [
        "南京市长江大桥很长。",
        "我们在北京大学学习计算机科学。",
        "他喜欢音乐和电影。",
        "天气预报说明天下雨。",
    ]
    documents = ["\n".join(sentences[i % 4 :] + sentences[: i % 4] * (i // 4 + 1)) for i in range(24)]
    (place / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    characters = sorted(set("".join(sentences)))
    (place / "vocab.txt").write_text("\n".join([*SPECIAL_PIECES, *characters]) + "\n")
    whole = {}
    for unit in ("token", "whole_word"):
        folder = place / unit
        options = [
            "--word_segmenter",
            "jieba",
            "--mask_unit",
            unit,
            "--mask_fraction",
            "0.3",
            "--output",
            str(folder),
        ]
        assert main([*shards(place), *options]) == 0
        capsys.readouterr()
        assert main(["inspect", str(folder), "--vocab", str(place / "vocab.txt")]) == 0
        whole[unit] = float(facts(capsys.readouterr().out)["words masked whole"].split()[0])
    assert whole["whole_word"] > 0.9
    assert whole["token"] < 0.6


def test_records_come_out_as_json_lines_that_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "films.tsv").write_text('sentence\tstars\na "fine" film \t1\n\t0\n')
    recipe = tmp_path / "films.yaml"
    recipe.write_text(f"data:\n  dir: {tmp_path}\n  columns: [text=sentence, label=stars]\n")
    assert main(["records", "films.tsv", "--config", str(recipe)]) == 0
    lines = capsys.readouterr().out
    films = [{"id": "0", "text": 'a "fine" film ', "label": "1"}, {"id": "1", "text": "", "label": "0"}]
    assert [json.loads(line) for line in lines.splitlines()] == films
    (tmp_path / "again.jsonl").write_text(lines)
    assert main(["records", str(tmp_path / "again.jsonl")]) == 0
    assert capsys.readouterr().out == lines

    # With a recipe that names the classes, the lines have these names, as the model does.
    named = "  labels: ['1', '0']\n  label_names: [good, bad]\n"
    recipe.write_text(recipe.read_text() + named)
    assert main(["records", "films.tsv", "--config", str(recipe)]) == 0
    found = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["good", "bad"]

    answers = [{"text": "Rome", "answer_start": 3}]
    questions = [
        {"id": "a", "text": "Where?", "text_pair": "in Rome", "answers": answers},
        {"id": "b", "text": "Who?", "text_pair": "in Rome", "answers": []},
    ]
    words = {"id": "c", "words": ["in", "Rome"], "tags": ["O", "B-LOC"]}
    for kind, records in (("qa", questions), ("tagging", [words])):
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        assert main(["records", str(tmp_path / f"{kind}.jsonl"), "--kind", kind]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records


# ------------------------------------------------------------------ mistakes


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "bert-data inspect DIR" in capsys.readouterr().out
    assert main(["shards", "--help"]) == 0
    assert "--data.mask-unit" in capsys.readouterr().out.replace("_", "-")


@pytest.mark.parametrize(
    ("argv", "expected", "sections"),
    [
        (["vocab", "--vocab_size", "99", "--kind", "bpe", "--output", "v"],
         {"model.vocab_size": 99, "data.tokenizer": "bpe"}, {"model", "data"}),
        (["shards", "--config", "quickstart", "--workers=3", "--output", "out", "--runner", "beam", "--", "--x"],
         {"data.shards": "out", "data.workers": 3, "data.seq_length": 64, "model.vocab_size": 8192},
         {"model", "data"}),
        (["records", "--columns", "text=a", "label=b"],
         {"data.columns": ["text=a", "label=b"], "task.kind": "classification"}, {"task", "data"}),
        (["clean", "--near_duplicates", "0.7"], {"clean.near_duplicates": 0.7}, {"clean", "data"}),
    ],
)  # fmt: skip
def test_print_config(argv, expected, sections, place, monkeypatch, capsys) -> None:
    """The values of the options of the command, which a recipe sets again; nothing is read or written."""
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert main([argv[0], "--print_config", *argv[1:]]) == 0
    printed = yaml.safe_load(text := capsys.readouterr().out)
    assert {*printed} == sections and sorted(place.iterdir()) == before
    for key, value in expected.items():
        section, name = key.split(".")
        assert printed[section][name] == value
    (place / "recipe.yaml").write_text(text)
    assert main([argv[0], "--config", "recipe.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_help_to_a_reader_that_leaves() -> None:
    """As in ``bert-data shards --help | head``: nothing is said about it."""
    command = f"{sys.executable} -m bert_jax.commands.data shards --help | head -n 1"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "usage: bert-data shards [options]\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shard"], "unknown command; allowed: vocab, shards, index, inspect, records, clean, wikipedia"),
        (["shards", "--worker", "3"], "worker"),
        (["shards", "--data.sec_length", "3"], "did you mean 'data.seq_length'"),
        (["shards", "--workers", "two"], "whole number"),
        (["shards"], "data.shards"),
        (["index"], "expected one folder"),
        (["index", "/no/such"], "/no/such"),
        (["inspect", "/no/such"], "/no/such"),
        (["inspect", ".", "--examples", "-1"], "whole number"),
        (["vocab", "--output"], "--output: expected one argument"),
        (["records", "--columns", "text=1"], "no file before the options"),
        (["records", "/no/such.tsv"], "/no/such.tsv"),
        (["inspect", "--print_config"], "accepts no recipe; allowed for: vocab, shards, records, clean"),
        (["shards", "--print_config", "--sec_length", "3"], "unknown section"),
    ],
)
def test_wrong_command_lines(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(capsys, argv)


def test_wrong_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = place / "corpus.txt"
    corpus.write_bytes(b"w1a .\nw1b .\n\nw2 \xff .\n")
    assert f"{corpus}:4: not valid UTF-8" in fails(capsys, shards(place))
    corpus.write_text("")
    assert f"{corpus}: the file is empty" in fails(capsys, shards(place))
    corpus.write_text("\n\n \n")
    assert "data.corpus" in fails(capsys, shards(place))
    corpus.write_text("w1a .\nw1b .\n")
    assert "blank lines" in fails(capsys, shards(place))
    corpus.unlink()
    assert f"{corpus}: no such file" in fails(capsys, shards(place))
    assert not (place / "shards" / "train").exists()


def test_wrong_vocabulary(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = place / "vocab.txt"
    vocab.write_text(vocab.read_text().replace("[MASK]", "[mask]"))
    assert "[MASK]" in fails(capsys, shards(place))
    vocab.unlink()
    assert f"{vocab}: no such" in fails(capsys, shards(place))


def test_other_settings(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shards(place)) == 0
    assert "data.seq_length: shards 32, config 64" in fails(capsys, shards(place, "--seq_length", "64"))


def test_unwritable_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "file").write_text("")
    for folder in (place / "file" / "shards", Path("/proc/shards")):
        assert str(folder.parent) in fails(capsys, [*shards(place), "--output", str(folder)])


@pytest.mark.slow
def test_disk_full(place: Path) -> None:
    # A limit on file size ends a write as a full disk does, in parent and workers alike.
    write_corpus(place / "corpus.txt", documents=200)
    argv = [*shards(place), "--workers", "2"]
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 16}, {1 << 16}))\n"
    limited += "from bert_jax.commands.data import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", limited, *argv], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    assert len(run.stderr.splitlines()) == 1 and "File too large" in run.stderr
    assert not (place / "shards" / "train").exists()
    # With space again, the build goes on and ends as if nothing had been.
    assert main(argv) == 0
    assert main([*argv, "--output", str(place / "other")]) == 0
    assert tree(place / "shards") == tree(place / "other")
