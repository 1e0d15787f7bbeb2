"""Tokenizers of all families: this library against AutoTokenizer of transformers.

    python studies/families/family_tokenizers.py --data DIR --peer_python PYTHON ... [--families NAME ...] [--lines 10000]
        [--output JSONL]

Trains a small vocabulary for every family on text in four languages, with the special pieces, ids and kinds of
pieces of the published ones, and makes three folders in each PYTHON (an environment with one release of
transformers): "files" contains the older files of the family (SentencePiece model, vocab.json with merges.txt,
vocab.txt), "saved" is written by ``save_pretrained`` of AutoTokenizer from them (ModernBERT: from tokenizer.json),
and "written" by this library from "saved". Reads each folder with this library and with AutoTokenizer, and compares
ids, token types and attention masks of single texts, pairs, and both cut to 16 and 64 tokens. DIR contains
``corpus/{en_books,de_help,ru_lit,zh_wiki}``; a quarter of the lines is from each, and odd words follow. Prints one
JSON line per family, release and folder. Exit code 3 if an input differs for a reason other than those in the table
of exceptions.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from family_files import FAMILIES, make_files

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.tokenization import Tokenizer, build_tokenizer

PARTS = ("files", "saved", "written")
LENGTHS = (16, 64)
CORPORA = ("en_books", "de_help", "ru_lit", "zh_wiki")
# The library tries every combination of what it cuts from the two texts, so the texts of such a pair are short.
CUT_CHARACTERS = 300
# Reasons why inputs may differ. Those of BERT may concern at most this fraction of the inputs without odd words.
MOST = 0.001
BERT = (
    "words of 101 to 200 characters are split, unassigned characters are kept and a final sigma is one, as in "
    "google-research/bert; transformers has [UNK] for such words and drops these characters"
)
REBUILT = "5.23 does not apply to SentencePiece files"
# (family, folder, release) -> reason; "*" stands for any.
EXCEPTIONS = {
    **{(family, part, "*"): BERT for family in ("bert", "distilbert", "electra") for part in PARTS},
    ("albert", "files", "5.23"): f"{REBUILT} user-defined pieces and ALBERT's rule for digits before a comma",
    (
        "albert, cased",
        "files",
        "5.23",
    ): f"{REBUILT} user-defined pieces and ALBERT's rule for digits before a comma",
    ("big_bird", "files", "5.23"): f"{REBUILT} the character map of the model",
    ("deberta-v2", "files", "5.23"): f"{REBUILT} the character map of the model",
}
# Runs in the environment of a release.
RUN = """
import json, sys
import numpy as np
import transformers
job = json.load(open(sys.argv[1]))
texts, others, lengths, characters = job["texts"], job["others"], job["lengths"], job["characters"]
for one in job["folders"]:
    made = transformers.AutoTokenizer.from_pretrained(one["folder"])
    if one["save"]:
        made.save_pretrained(one["save"])
    rows = {"input_ids": [], "token_type_ids": [], "attention_mask": []}
    def run(a, b, **options):
        batch = a if b is None else list(zip(a, b))
        for start in range(0, len(batch), 100):
            found = made(batch[start : start + 100], return_token_type_ids=one["types"], **options)
            for key, values in rows.items():
                values += found[key] if key in found else [[0] * len(row) for row in found["input_ids"]]
    run(texts, None)
    run(texts, others)
    short = [[text[:characters] for text in column] for column in (texts, others)]
    for length in lengths:
        run(texts, None, truncation=True, max_length=length)
        run(*short, truncation=True, max_length=length)
    counts = np.array([len(row) for row in rows["input_ids"]])
    flat = {key: np.array([value for row in values for value in row], np.int32) for key, values in rows.items()}
    np.savez(one["answer"], counts=counts, name=type(made).__name__, **flat)
print(".".join(transformers.__version__.split(".")[:2]))
"""

ODD = (
    "line\u2028separator",
    "\u2028",
    "a\u0301\u0327\u0323 \u00c5ngstr\u00f6m \u1e69 e\u0301",
    "\u039f\u0394\u039f\u03a3 \u03a3",
    "\u0130stanbul \u01c5",
    "x\u200by soft\u00adhyphen \x07bell \x85 \ufffd",
    "\ue000 \u0378 \U0001f600\U0001f1e9",
    "\u4e2d\u6587abc\u5b57\uf900\U00020000",
    "\u3042\u30ab\uac00\ub098",
    "\ufb01 \u00bd \ufdfa \u3392",
    "",
    " ",
    "a\tb\nc\rd",
    "  two  spaces   three",
    "trailing ",
    " leading",
    "``quoted'' (1,000,000), 3,5 and 12,",
    "don't I'll we've",
    "http://a.b/c?d=e&f#g",
    "1234567890" * 5,
    "\u00a0no\u3000break",
    "\u2581mark \u0120mark",
    "A(b)c-d.e",
    "\U0001f469\u200d\U0001f680",
    "def f(x):\n    return x  # comment\n\n\n",
    "|||IP_ADDRESS||| a        b",
)


def corpus(data: Path, lines: int, corpora: Sequence[str] = CORPORA) -> list[str]:
    """Return ``lines`` lines of text, a quarter in each language, or those of ``corpora`` alone."""
    found: list[str] = []
    for name in corpora:
        files = sorted((data / "corpus" / name).glob("train*.txt")) or sorted(
            (data / "corpus" / name).glob("*.txt")
        )
        text = (line for file in files for line in file.read_text(encoding="utf-8").split("\n"))
        found += itertools.islice(filter(None, text), lines // len(CORPORA))
    return found


def odd_words() -> list[str]:
    """Return texts that real lines hardly contain."""
    long = [
        letter * n + tail
        for n in (99, 100, 101, 150, 199, 200, 201)
        for letter, tail in (("a", " b"), ("\u00e9", ","))
    ]
    return [*ODD, *long]


# ------------------------------------------------------------------ comparison


def own_tokenizer(folder: Path) -> tuple[Tokenizer, Any, bytes]:
    config, content, _ = read_tokenizer_files(folder, ReadOptions())
    assert config is not None and content is not None
    return build_tokenizer(config, content, str(folder)), config, content


def own_rows(
    tokenizer: Tokenizer, texts: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ids and types of the inputs in the order of ``RUN``."""
    ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    short = {text: tokenizer.encode(text[:CUT_CHARACTERS]) for text in texts}
    forms = [(ids, None, None), (ids, ids, None)]
    forms += [form for length in LENGTHS for form in ((ids, None, length), (short, short, length))]
    for firsts, seconds, length in forms:
        for a, b in zip(texts, others, strict=True):
            yield tokenizer.build_inputs(firsts[a], seconds and seconds[b], length)


def differences(tokenizer: Tokenizer, texts: Sequence[str], others: Sequence[str], answer: Path) -> dict[str, Any]:
    """Return the number of inputs, and of those that differ in ids, types and masks: of all, and of those without
    made odd words."""
    found = np.load(answer)
    ends = np.cumsum(found["counts"])[:-1]
    theirs = [np.split(found[key], ends) for key in ("input_ids", "token_type_ids", "attention_mask")]
    fields = ("ids", "types", "masks")
    wrong, of_lines, first = dict.fromkeys(fields, 0), dict.fromkeys(fields, 0), dict[str, None]()
    made, count = set(odd_words()), 0
    for number, (ids, types) in enumerate(own_rows(tokenizer, texts, others)):
        count += 1
        for key, mine, its in zip(wrong, (ids, types, [1] * len(ids)), theirs, strict=True):
            if mine != its[number].tolist():
                wrong[key] += 1
                text, other = texts[number % len(texts)], others[number % len(texts)]
                of_lines[key] += made.isdisjoint((text, other) if number // len(texts) % 2 else (text,))
                first[text[:40]] = None
    return {
        "class": str(found["name"]), "inputs": count, "unequal": wrong, "unequal_lines": of_lines,
        "first": list(first)[:5],
    }  # fmt: skip


def run_peer(python: str, root: Path, folders: list[dict[str, Any]], texts: list[str], others: list[str]) -> str:
    """Run ``RUN`` and return the release."""
    job = {"folders": folders, "texts": texts, "others": others, "lengths": LENGTHS, "characters": CUT_CHARACTERS}
    (root / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment.pop("PYTHONPATH", None)
    command = [python, "-c", RUN, str(root / "job.json")]
    return subprocess.run(
        command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def write_again(saved: Path, folder: Path, family: str) -> None:
    """Write the tokenizer of ``saved`` with this library."""
    tokenizer, config, content = own_tokenizer(saved)
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=64
    )
    folder.mkdir()
    write_tokenizer_files(folder, ModelSpec(model=model, heads=HeadsConfig(), tokenizer=config), content)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))


def job(place: Path, part: str, save: str) -> dict[str, Any]:
    """Return what ``RUN`` does with a folder. Token types are asked for if this library's differ from 0."""
    tokenizer = own_tokenizer(place / part)[0]
    return {
        "folder": str(place / part),
        "save": save and str(place / save),
        "answer": str(place / f"{part}.npz"),
        "types": tokenizer.second_type == 1 and tokenizer.framed,
    }


def measure(python: str, root: Path, names: Sequence[str], texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of all families in the release of ``python``."""
    others = [*texts[len(texts) // 2 :], *texts[: len(texts) // 2]]

    def jobs(part: str) -> list[dict[str, Any]]:
        return [job(root / name, part, "saved" if part == "files" else "") for name in names]

    release = run_peer(python, root, jobs("files"), texts, others)
    for name in names:
        (root / name / "saved" / "config.json").write_text(json.dumps({"model_type": FAMILIES[name][0]}))
        write_again(root / name / "saved", root / name / "written", FAMILIES[name][0])
    run_peer(python, root, jobs("saved") + jobs("written"), texts, others)
    for name in names:
        for part in PARTS:
            tokenizer = own_tokenizer(root / name / part)[0]
            figure = differences(tokenizer, texts, others, root / name / f"{part}.npz")
            keys = itertools.product((name, "*"), (part, "*"), (release, "*"))
            reason = next((EXCEPTIONS[key] for key in keys if key in EXCEPTIONS), "")
            equal = not any(figure["unequal"].values())
            if reason == BERT and max(figure["unequal_lines"].values()) > MOST * figure["inputs"]:
                reason = ""
            figure = {"family": name, "release": release, "folder": part, "kind": tokenizer.kind, **figure}
            yield {**figure, "exception": "" if equal else reason, "ok": equal or bool(reason)}


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains corpus/")
    parser.add_argument("--peer_python", nargs="+", required=True, help="Pythons with transformers")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    options = parser.parse_args()
    real = corpus(options.data, options.lines)
    texts = list(dict.fromkeys([*real, *odd_words()]))
    figures = []
    for python in options.peer_python:
        with tempfile.TemporaryDirectory() as temporary:
            make_files(Path(temporary), options.families, real)
            for figure in measure(python, Path(temporary), options.families, texts):
                figures.append({"command": "python studies/families/family_tokenizers.py", **figure})
                print(json.dumps(figures[-1], ensure_ascii=False), flush=True)
    if options.output:
        options.output.write_text("".join(json.dumps(figure, ensure_ascii=False) + "\n" for figure in figures))
    return 0 if all(figure["ok"] for figure in figures) else 3


if __name__ == "__main__":
    sys.exit(main())
