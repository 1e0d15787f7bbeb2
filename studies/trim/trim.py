"""A vocabulary of 119,547 pieces, that of multilingual BERT, trimmed to one language.

    python studies/trim/trim.py --corpus FILE_OR_FOLDER ... --language FILE --folder DIR [--pieces 119547]

Three vocabularies are trained on all texts of --corpus: cased WordPiece, and SentencePiece (unigram, BPE). Each is
trimmed to nine tenths of the lines of --language; the last tenth is unseen. Measured on the unseen lines: pieces
with the trimmed vocabulary over pieces with the whole one, and [UNK] that the whole one does not have. Then a model
with each vocabulary, of two layers of width 64 with drawn weights, is trimmed by ``bert-jax trim``: the hidden
states of unseen lines that keep their pieces, and the logits of kept pieces.

A line of JSON per vocabulary. Exit code 3 if an unseen line has another number of [UNK], if the pieces are more
than 1.03 times as many, if a hidden state differs, or if logits differ by more than 1e-6 of the largest.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.compression.trim import trim_model
from bert_jax.inference.loaded import load
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, parameter_shapes
from bert_jax.interop.saved_model import write_saved
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.tokenization import Tokenizer, load_tokenizer
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents
from data_pipeline.text.vocabulary_training import train_vocabulary

KINDS = ("wordpiece", "unigram", "bpe")
LENGTH, ROWS = 64, 64
MOST_PIECES, MOST_LOGITS = 1.03, 1e-6


def lines_of(corpus: Sequence[str]) -> Iterator[str]:
    for source in list_sources(corpus):
        for document in read_documents(source, line="auto", json_field="text"):
            yield from document


def model(folder: Path, vocabulary: Path, size: int) -> None:
    """Save a model with drawn weights."""
    config = ModelConfig(
        vocab_size=size, hidden_size=64, num_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    tokenizer = TokenizerConfig(file=vocabulary.name, lower_case=False)
    spec = ModelSpec(model=config, heads=HeadsConfig(mlm=True), tokenizer=tokenizer)
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(float(name.endswith("scale")), 0.1, shape).astype(np.float32)
        for name, shape in parameter_shapes(spec).items()
    }
    write_saved(folder, ModelBundle(spec=spec, params=params, tokenizer_content=vocabulary.read_bytes()))


def rows(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, np.ndarray]:
    ids = np.full((len(texts), LENGTH), tokenizer.pad_id)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        own, _ = tokenizer.build_inputs(tokenizer.encode(text), max_length=LENGTH)
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    return {"input_ids": ids, "attention_mask": mask}


def measure(kind: str, folder: Path, vocabulary: Path, seen: Path, unseen: Sequence[str]) -> dict[str, Any]:
    """Return the line of a vocabulary."""
    size = load_tokenizer(vocabulary, lower_case=False).vocab_size
    if not (folder / "whole").exists():
        model(folder / "whole", vocabulary, size)
    if not (folder / "part").exists():
        trim_model(folder / "whole", folder / "part", [str(seen)], ReadOptions())
    whole, part = load(folder / "whole"), load(folder / "part")
    old, new = whole.tokenizer, part.tokenizer
    ids = np.array([old.piece_id(piece) for piece in new.pieces(range(new.vocab_size))])
    before, after = old.encode_batch(unseen), new.encode_batch(unseen)
    other = sum(a.count(old.unk_id) != b.count(new.unk_id) for a, b in zip(before, after, strict=True))
    same = [text for text, a, b in zip(unseen, before, after, strict=True) if a == ids[b].tolist()]
    texts = same[:ROWS]
    mine = rows(new, texts)
    outputs = [
        each.forward({**mine, "input_ids": values})
        for each, values in ((whole, ids[mine["input_ids"]]), (part, mine["input_ids"]))
    ]
    visible = mine["attention_mask"] > 0
    states = [each["last_hidden_state"][visible] for each in outputs]
    logits = [outputs[0]["mlm_logits"][..., ids][visible], outputs[1]["mlm_logits"][visible]]
    return {
        "kind": kind, "pieces": size, "kept": len(ids), "unseen_lines": len(unseen),
        "unknown": sum(row.count(old.unk_id) for row in before), "lines_with_other_unknown": other,
        "tokens": sum(map(len, before)), "tokens_ratio": round(sum(map(len, after)) / sum(map(len, before)), 5),
        "lines_with_same_pieces": len(same), "compared": len(texts),
        "hidden_states_equal": bool(np.array_equal(*states)),
        "logits_difference": float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", required=True, help="as data.corpus; of the vocabularies")
    parser.add_argument("--language", required=True, help="one text per line, to which they are trimmed")
    parser.add_argument("--folder", type=Path, required=True, help="vocabularies and models")
    parser.add_argument("--pieces", type=int, default=119_547)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, help="write the lines there")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [line for line in lines_of([options.language]) if line.strip()]
    cut = len(lines) * 9 // 10
    seen = options.folder / "seen.txt"
    seen.write_text("\n".join(lines[:cut]), encoding="utf-8")
    is_good, written = True, []
    for kind in options.kinds:
        folder = options.folder / kind
        vocabulary = folder / ("vocab.txt" if kind == "wordpiece" else "tokenizer.model")
        if not vocabulary.exists():
            folder.mkdir(exist_ok=True)
            train_vocabulary(
                lines_of(options.corpus), kind=kind, vocab_size=options.pieces, lower_case=False, output=vocabulary
            )
        line = measure(kind, folder, vocabulary, seen, lines[cut:])
        is_good &= (
            not line["lines_with_other_unknown"] and line["tokens_ratio"] <= MOST_PIECES
            and line["hidden_states_equal"] and line["logits_difference"] <= MOST_LOGITS
        )  # fmt: skip
        written.append(json.dumps(line) + "\n")
        print(written[-1], end="", flush=True)
    if options.output:
        options.output.write_text("".join(written))
    return 0 if is_good else 3


if __name__ == "__main__":
    sys.exit(main())
