"""Exported tokenizers in transformers' AutoTokenizer against this library's own, over real lines.

    python -m tests.golden.compare_tokenizers --data DIR [--lines 10000]

DIR holds ``vocabs/bert-base-{uncased,cased,chinese}.txt`` and ``corpus/*/*.txt`` (a sentence a line). Needs
this library and, of requirements.lock in this folder, transformers. SentencePiece models are trained on the lines.
Prints, for single texts, pairs and both cut to a length, how many inputs differ in ids, token types, attention mask
and offsets, and which texts; texts that hold a special token are counted apart.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.tokenization import Tokenizer, build_tokenizer
from bert_jax.tokenization.tokenizer import Offsets, longest_first
from data_pipeline.text.vocabulary_training import train_vocabulary

Encoded = tuple[list[int], Offsets]
LENGTHS = (16, 64)
CHUNK = 100  # texts at a time
# Pieces of a text in a pair that is cut: the library makes every combination of what it cuts off both sides.
LONGEST_CUT = 100
FIELDS = ("ids", "types", "mask", "offsets")
SMALL = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def made_lines() -> list[str]:
    """What real lines hardly hold: long words, odd blanks, accents, characters that are dropped."""
    words = [
        letter * n + tail for n in range(99, 202) for letter, tail in (("a", " b"), ("\u00e9", ","), ("Z", ""))
    ]
    odd = [
        "line\u2028separator", "\u2028", "a\u0301\u0327\u0323 \u00c5ngstr\u00f6m \u1e69 e\u0301",
        "\u039f\u0394\u039f\u03a3 \u03a3", "\u0130stanbul \u01c5", "x\u200by soft\u00adhyphen \x07bell \x85 \ufffd",
        "\ue000 \u0378 \U0001f600\U0001f1e9", "\u4e2d\u6587abc\u5b57\uf900\U00020000",
        "\u3042\u30ab\uac00\ub098", "\ufb01 \u00bd \ufdfa \u3392", "", " ", "a\tb\nc\rd",
    ]  # fmt: skip
    return [*words, *odd]


def ours(tokenizer: Tokenizer, a: Encoded, b: Encoded | None, length: int | None) -> tuple:
    """Ids, types, mask and offsets of one input by this library."""
    ids_b, places_b = b if b is not None else ([], [])
    ids, types = tokenizer.build_inputs(a[0], None if b is None else ids_b, length)
    kept_a, kept_b = len(a[0]), len(ids_b)
    if length is not None and b is not None:
        kept_a, kept_b = longest_first(kept_a, kept_b, length - 3)
    elif length is not None:
        kept_a = length - 2
    places = [(0, 0), *a[1][:kept_a], (0, 0), *places_b[:kept_b], *([(0, 0)] if b is not None else [])]
    return ids, types, [1] * len(ids), places


def theirs(
    tokenizer: Any, texts: Sequence[str], others: Sequence[str] | None, length: int | None
) -> Iterator[tuple[list, ...]]:
    """The same of all texts, or all pairs, by transformers."""
    options = {} if length is None else {"truncation": True, "max_length": length}
    batch: Any = list(texts) if others is None else list(zip(texts, others, strict=True))
    names = ("input_ids", "token_type_ids", "attention_mask", "offset_mapping")
    for start in range(0, len(batch), CHUNK):
        found = tokenizer(batch[start : start + CHUNK], return_offsets_mapping=True, **options)
        yield from zip(*(found[name] for name in names), strict=True)


def export(name: str, vocabulary: Path, lower_case: bool, folder: Path) -> tuple[Tokenizer, Any]:
    """This library's tokenizer and what AutoTokenizer makes of the files written for it."""
    file = "vocab.txt" if vocabulary.suffix == ".txt" else "tokenizer.model"
    config = TokenizerConfig(file=file, lower_case=lower_case)
    content = vocabulary.read_bytes()
    own = build_tokenizer(config, content, name)
    model = ModelConfig(vocab_size=own.vocab_size, **SMALL)
    folder.mkdir()
    notes = write_tokenizer_files(
        folder, ModelSpec(model=model, heads=HeadsConfig(), tokenizer=config), content, exact=True
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": own.vocab_size}))
    other = AutoTokenizer.from_pretrained(folder)
    print(f"\n{name}: {type(other).__name__}, {len(other)} pieces", *notes, sep="\n  stated: ", flush=True)
    return own, other


def compare(own: Tokenizer, other: Any, lines: Sequence[str]) -> None:
    shifted = [*lines[1:], lines[0]]
    encoded = dict(zip(lines, map(own.encode_with_offsets, lines), strict=True))
    forms: dict[str, tuple[list[str] | None, tuple[int | None, ...]]] = {
        "single": (None, (None,)), "pair": (shifted, (None,)),
        "single, cut": (None, LENGTHS), "pair, cut": (shifted, LENGTHS),
    }  # fmt: skip
    for form, (others, lengths) in forms.items():
        if form == "pair, cut":
            lines = [line for line in lines if len(encoded[line][0]) <= LONGEST_CUT]
            others = [*lines[1:], lines[0]]
        wrong = Counter(dict.fromkeys(FIELDS, 0))
        texts: dict[str, list[str]] = {}
        for length in lengths:
            found = theirs(other, lines, others, length)
            for i, (line, right) in enumerate(zip(lines, found, strict=True)):
                left = ours(own, encoded[line], None if others is None else encoded[others[i]], length)
                for field, mine, its in zip(FIELDS, left, right, strict=True):
                    if list(mine) != list(its):
                        wrong[field] += 1
                        texts.setdefault(field, []).append(line[:50])
        print(f"  {form:12}", len(lines) * len(lengths), "inputs; unequal:", dict(wrong), flush=True)
        if form == "single":
            for field, some in texts.items():
                print(f"    {field}:", some[:12])
    marked = ["[MASK]", "The [MASK] sat.", "a[SEP]b [CLS] [PAD] [UNK] x"]
    differ = sum(
        own.encode(text) != row[0][1:-1]
        for text, row in zip(marked, theirs(other, marked, None, None), strict=True)
    )
    unmasked = sum(
        own.encode_with_masks(text) != other(text, add_special_tokens=False)["input_ids"] for text in marked[:2]
    )
    print(f"  special tokens in the text: {differ} of 3 differ; with masks recognised {unmasked} of 2")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--only", nargs="*", default=["uncased", "cased", "chinese", "unigram", "bpe"])
    arguments = parser.parse_args()
    corpora = sorted((arguments.data / "corpus").glob("*/train*.txt"))
    real: list[str] = []
    for path in corpora:
        found = (line for line in path.read_text(encoding="utf-8").split("\n") if line)
        real += [line for line, _ in zip(found, range(arguments.lines // len(corpora)), strict=False)]
    lines = [*made_lines(), *real]
    vocabularies = arguments.data / "vocabs"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, lower_case in (("uncased", True), ("cased", False), ("chinese", True)):
            if name not in arguments.only:
                continue
            compare(*export(name, vocabularies / f"bert-base-{name}.txt", lower_case, folder / name), lines)
        for kind in ("unigram", "bpe"):
            if kind not in arguments.only:
                continue
            model = folder / f"{kind}.model"
            train_vocabulary(real, kind=kind, vocab_size=8000, lower_case=False, output=model)
            compare(*export(f"sentencepiece {kind}", model, False, folder / kind), lines)


if __name__ == "__main__":
    main()
