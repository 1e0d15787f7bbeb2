"""Tokenizers of exported folders in a web page: this library against transformers.js and AutoTokenizer.

    python studies/families/transformers_js.py --data DIR --node_modules DIR [--peer_python PYTHON] [--lines 500]
        [--folders EXPORT ...]

Trains a small vocabulary for every kind of tokenizer (WordPiece uncased, cased, Chinese; unigram of XLM-R and
ALBERT; byte-level BPE of RoBERTa and GPT-2; the SentencePiece model of ``bert-data vocab``) on text in four
languages, writes the tokenizer files of an export, and encodes lines with this library, with transformers.js in
node and, if ``--peer_python`` has transformers, with AutoTokenizer. ``--folders`` are further exports. ``--data``
contains ``corpus/``; ``--node_modules`` is the folder in which ``npm install --ignore-scripts
@huggingface/transformers`` was run. Prints one JSON line per tokenizer: the lines, those that differ in each of the
two, those of them without a character that the note of the export names ("unexplained"), and the first three of
these. Exit code 3 if WordPiece or byte-level BPE has unexplained lines.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers
from family_files import PIECES, albert, fairseq, gpt2, roberta, word_pieces, write_pieces
from family_tokenizers import CORPORA, corpus, odd_words, own_tokenizer, write_again
from tokenizers import models, pre_tokenizers, trainers

from bert_jax.interop.tokenizers.tokenizer_state import is_unlisted, otherwise_treated
from bert_jax.tokenization import SPECIAL_PIECES, Tokenizer
from data_pipeline.text.vocabulary_training import train_vocabulary

NODE = """
import { createRequire } from 'node:module';
import { readFileSync, writeFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';
const [job, modules] = process.argv.slice(2);
const require = createRequire(modules + '/');
const found = require.resolve('@huggingface/transformers');
const { AutoTokenizer, env } = await import(pathToFileURL(found));
env.allowRemoteModels = false;
const { root, folders, texts } = JSON.parse(readFileSync(job));
env.localModelPath = root;
const rows = {};
for (const folder of folders) {
  try {
    const tokenizer = await AutoTokenizer.from_pretrained(folder);
    rows[folder] = texts.map((text) => tokenizer.encode(text).map(Number));
  } catch (error) { rows[folder] = String(error); }
}
writeFileSync(job + '.js', JSON.stringify(rows));
"""
PEER = """
import json, sys, transformers
job = json.load(open(sys.argv[1]))
rows = {}
for folder in job["folders"]:
    made = transformers.AutoTokenizer.from_pretrained(job["root"] + "/" + folder)
    rows[folder] = [list(map(int, made(text)["input_ids"])) for text in job["texts"]]
json.dump(rows, open(sys.argv[1] + ".py", "w"))
"""


def cased(folder: Path, lines: Sequence[str]) -> None:
    """Train a cased WordPiece vocabulary."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=PIECES, special_tokens=list(SPECIAL_PIECES), limit_alphabet=1500, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    write_pieces(folder, sorted(made.get_vocab(), key=made.get_vocab().__getitem__))


def uncased(folder: Path, lines: Sequence[str]) -> None:
    """Train an uncased WordPiece vocabulary."""
    write_pieces(folder, word_pieces(lines, SPECIAL_PIECES))


def own_sentencepiece(folder: Path, lines: Sequence[str]) -> None:
    """Train a SentencePiece model as ``bert-data vocab`` does."""
    model = folder / "tokenizer.model"
    train_vocabulary(lines, kind="unigram", vocab_size=PIECES, lower_case=True, output=model)


LOWER = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
# Tokenizer -> (family, trainer, settings, corpora).
TOKENIZERS: dict[str, tuple[str, Any, dict[str, Any], tuple[str, ...]]] = {
    "wordpiece_uncased": ("bert", uncased, LOWER, CORPORA),
    "wordpiece_cased": ("bert", cased, {**LOWER, "do_lower_case": False}, CORPORA),
    "wordpiece_chinese": ("bert", uncased, LOWER, ("zh_wiki",)),
    "unigram_xlmr": ("xlm-roberta", fairseq, {}, CORPORA),
    "unigram_albert": ("albert", albert, {}, CORPORA),
    "bytes_roberta": ("roberta", roberta, {}, CORPORA),
    "bytes_gpt2": ("gpt2", gpt2, {}, CORPORA),
    "sentencepiece": ("bert", own_sentencepiece, {}, CORPORA),
}


def written(root: Path, name: str, data: Path, lines: int) -> None:
    """Train a tokenizer and write the files of its export to the folder ``name`` of ``root``."""
    family, train, settings, corpora = TOKENIZERS[name]
    files = root / f"{name}.files"
    files.mkdir()
    train(files, corpus(data, lines * len(CORPORA) // len(corpora), corpora))
    (files / "config.json").write_text(json.dumps({"model_type": family}))
    if settings:
        (files / "tokenizer_config.json").write_text(json.dumps(settings))
    write_again(files, root / name, family)


def excused(tokenizer: Tokenizer, text: str) -> bool:
    """Return True if the rules that are written for WordPiece may treat ``text`` otherwise, as the note of an
    export says."""
    if tokenizer.kind != "wordpiece":
        return False
    rules = {name: getattr(tokenizer, name) for name in ("lower_case", "strip_accents", "split_cjk")}
    return any(char in otherwise_treated(**rules) or is_unlisted(char) for char in text)


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains corpus/")
    parser.add_argument("--node_modules", type=Path, required=True, help="folder of npm install")
    parser.add_argument("--peer_python", help="Python with transformers")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="further exported folders")
    parser.add_argument("--tokenizers", nargs="*", choices=TOKENIZERS, default=list(TOKENIZERS))
    options = parser.parse_args()
    if shutil.which("node") is None:
        parser.error("node is not installed: transformers.js needs it (apt install nodejs npm)")
    texts = list(dict.fromkeys([*corpus(options.data, options.lines), *odd_words()]))
    is_right = True
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in options.tokenizers:
            written(root, name, options.data, max(options.lines, 4000))
        for folder in options.folders:
            shutil.copytree(folder, root / folder.name, ignore=shutil.ignore_patterns("*.safetensors", "*.onnx"))
        names = [*options.tokenizers, *(folder.name for folder in options.folders)]
        job = root / "job.json"
        job.write_text(json.dumps({"root": str(root), "folders": names, "texts": texts}))
        (root / "run.mjs").write_text(NODE)
        command = ["node", str(root / "run.mjs"), str(job), str(options.node_modules.resolve())]
        subprocess.run(command, check=True)
        others = {"transformers.js": json.loads((root / "job.json.js").read_text())}
        if options.peer_python:
            subprocess.run([options.peer_python, "-c", PEER, str(job)], check=True, env={"HF_HUB_OFFLINE": "1"})
            others["AutoTokenizer"] = json.loads((root / "job.json.py").read_text())
        for name in names:
            tokenizer = own_tokenizer(root / name)[0]
            rows = [tokenizer.build_inputs(ids)[0] for ids in tokenizer.encode_batch(texts)]
            line: dict[str, Any] = {"tokenizer": name, "kind": tokenizer.kind, "lines": len(texts)}
            for other, found in others.items():
                if isinstance(found[name], str):
                    line[other], is_right = found[name][:200], False
                    continue
                wrong = [text for text, own, its in zip(texts, rows, found[name], strict=True) if own != its]
                left = [text for text in wrong if not excused(tokenizer, text)]
                line[other] = {"differ": len(wrong), "unexplained": len(left), "first": [t[:60] for t in left[:3]]}
                is_right &= not left or tokenizer.kind not in ("wordpiece", "byte_bpe")
            print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0 if is_right else 3


if __name__ == "__main__":
    sys.exit(main())
