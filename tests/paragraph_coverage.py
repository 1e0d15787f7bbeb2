"""Sentences of every script: paragraphs against the same text with a sentence a line.

Makes up documents in 16 scripts, with the marks of each, and in English and Russian without capitals; every word
occurs once. Builds shards with sentence pairs from the paragraphs and from the same text with a sentence on each
line, and compares the share of the text that is in some row after one pass, the share of random next segments, and
the words that are in no row after several passes. The shares may differ by 0.02 and 0.05, and no word may be
missing. The last script has paragraphs without marks, longer than a row, and a bar for its words alone.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.tokenization import SPECIAL_PIECES
from data_pipeline.build.ensure import ensure_data
from data_pipeline.shards.shard_files import read_index, read_records
from data_pipeline.shards.tfexample import decode_example

SHARES = {"in_rows": 0.02, "random_next": 0.05}  # largest differences


@dataclass(frozen=True)
class Script:
    """Letters of a script, the marks that end its sentences, and the text between words."""

    letters: str
    marks: str
    space: str = " "
    capitals: bool = False
    word: int = 4  # letters of a word


def _letters(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


SCRIPTS = {
    "english": Script(_letters(0x61, 0x7A), ".?!", capitals=True),
    "english_lower": Script(_letters(0x61, 0x7A), ".?!"),
    "russian_lower": Script(_letters(0x430, 0x44F), ".?!"),
    "greek": Script(_letters(0x3B1, 0x3C1), ".;", capitals=True),
    "georgian": Script(_letters(0x10D0, 0x10F0), ".?"),
    "hebrew": Script(_letters(0x5D0, 0x5EA), ".?"),
    "hindi": Script(_letters(0x915, 0x939), "\u0964\u0965"),
    "bengali": Script(_letters(0x995, 0x9A8), "\u0964"),
    "urdu": Script(_letters(0x627, 0x63A), "\u06d4"),
    "arabic": Script(_letters(0x627, 0x63A), "\u061f"),
    "amharic": Script(_letters(0x1210, 0x1240), "\u1362\u1367"),
    "armenian": Script(_letters(0x561, 0x586), "\u0589", capitals=True),
    "burmese": Script(_letters(0x1000, 0x1020), "\u104b"),
    "khmer": Script(_letters(0x1780, 0x17A2), "\u17d4\u17d5"),
    "tibetan": Script(_letters(0xF40, 0xF47) + _letters(0xF49, 0xF6A), "\u0f0d"),
    "thai": Script(_letters(0xE01, 0xE2E), "", space=""),
    "lao": Script(
        "\u0e81\u0e82\u0e84\u0e87\u0e88\u0e8a\u0e8d\u0e94\u0e95\u0e96\u0e97\u0e99\u0e9a\u0e9b", "", space=""
    ),
    "chinese": Script(_letters(0x4E00, 0x9FA0), "\u3002\uff1f", space="", word=1),
    "no_marks": Script(_letters(0x61, 0x7A), ""),
}


def make_documents(script: Script, documents: int, seed: int = 0) -> tuple[list[list[list[str]]], list[str]]:
    """Return documents, each a list of paragraphs of eight sentences, and all words, each of which occurs once."""
    draw = random.Random(seed)
    words: dict[str, None] = {}

    def sentence() -> str:
        made = []
        for _ in range(draw.randint(6, 12)):
            while (word := "".join(draw.choice(script.letters) for _ in range(script.word))) in words:
                pass
            words[word] = None
            made.append(word)
        text = script.space.join(made)
        if script.capitals:
            del words[made[0]]
            words[made[0].capitalize()] = None
            text = text[0].upper() + text[1:]
        return text + (draw.choice(script.marks) if script.marks else "")

    made = [[[sentence() for _ in range(8)] for _ in range(4)] for _ in range(documents)]
    return made, list(words)


def measure(folder: Path, name: str, *, per_line: bool, documents: int, passes: int) -> dict[str, float]:
    """Build shards; return the share of the words that are in a row, the share of random next segments, and the
    number of words in no row."""
    script = SCRIPTS[name]
    made, words = make_documents(script, documents)
    joint = "" if name == "chinese" else " "
    texts = [
        "\n".join(line for paragraph in document for line in (paragraph if per_line else [joint.join(paragraph)]))
        for document in made
    ]
    if not script.space and script.word > 1:
        words += [f"##{word}" for word in words]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    pieces = [*SPECIAL_PIECES, *script.marks, *words]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    data = DataConfig(
        corpus=(str(folder / "text.txt"),), vocab=str(folder / "vocab.txt"), shards=str(folder / "shards"),
        seq_length=64, max_predictions=10, masking="dynamic", dupe_factor=passes, num_shards=1, eval_fraction=0.0,
        workers=1, lower_case=False,
    )  # fmt: skip
    ensure_data(data, vocab_size=len(pieces), report=lambda _: None)
    train = folder / "shards" / "train"
    rows = [decode_example(one) for entry in read_index(train).entries for one in read_records(train / entry.name)]
    seen = np.unique(np.concatenate([row["input_ids"] for row in rows]))
    first = len(SPECIAL_PIECES) + len(script.marks)
    index = {piece: number for number, piece in enumerate(pieces)}
    found = {pieces[number].removeprefix("##") for number in seen if number >= first}
    wanted = {piece.removeprefix("##") for piece in pieces[first:]}
    assert index["[UNK]"] not in seen
    return {
        "in_rows": len(found) / len(wanted),
        "random_next": float(np.mean([row["next_sentence_labels"][0] for row in rows])),
        "missing": len(wanted - found),
    }


def compare(folder: Path, name: str, *, documents: int = 30, passes: int = 10) -> dict[str, object]:
    """Return the figures of a script, and whether they are within the bars."""
    lines, paragraphs = (
        measure(folder / f"{name}-{kind}", name, per_line=kind == "lines", documents=documents, passes=1)
        for kind in ("lines", "paragraphs")
    )
    whole = measure(folder / f"{name}-all", name, per_line=False, documents=documents, passes=passes)
    near = name == "no_marks" or all(abs(paragraphs[key] - lines[key]) <= most for key, most in SHARES.items())
    shown = {key: [round(one[key], 3) for one in (lines, paragraphs)] for key in SHARES}
    return {"script": name, **shown, "missing": whole["missing"], "good": near and whole["missing"] == 0}
