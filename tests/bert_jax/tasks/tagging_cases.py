"""What the tests of tagging share: a tokenizer whose words have as many pieces as wanted, records, batches."""

import dataclasses

import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.inference.batching import Shape, fill_rows, pack_batch
from bert_jax.records import Record
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer

WORDS = 900
UNITS = 8  # per row
# Word number n is "n", followed by an x for every further piece; ids[n] == 5 + n.
TOKENIZER = WordPieceTokenizer([*SPECIAL_PIECES, *map(str, range(WORDS)), "##x"], lower_case=False)
CONTINUED = TOKENIZER.piece_id("##x")


def config(**sections):
    """A config with fields replaced, by section."""
    plain = FinetuneConfig()
    return dataclasses.replace(
        plain, **{name: dataclasses.replace(getattr(plain, name), **values) for name, values in sections.items()}
    )


def record(words, tags=None, label=None, group="", source="file:1"):
    """A record of blank-separated words and tags."""
    given = None if tags is None else tuple(tags.split())
    return Record(id=source, source=source, words=tuple(words.split()), tags=given, label=label, group=group)


def random_sentences(seed, count, most_words, most_pieces):
    """Records in which no word stands twice; their groups are runs, of which some have the same name."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, most_words + 1, count)
    numbers = iter(rng.permutation(WORDS)[: lengths.sum()])
    words = [[f"{next(numbers)}" + "x" * rng.integers(0, most_pieces) for _ in range(n)] for n in lengths]
    names = np.repeat(rng.choice(["A", "B", "C", ""], count), rng.integers(1, 4, count)).tolist()
    return [record(" ".join(words[i]), group=names[i], source=f"file:{i}") for i in range(count)]


def pieces(words):
    """Ids of words, by the rules of ``TOKENIZER``."""
    return [i for word in words for i in (5 + int(word.rstrip("x")), *[CONTINUED] * word.count("x"))]


def batch_of(task, units, length=64):
    """(batch of all units in rows of ``length``, place of each unit: row, slot, tokens)."""
    rows = fill_rows([unit.length for unit in units], (length,), UNITS)
    shape = Shape(len(rows), length, UNITS)
    packed = pack_batch(units, rows, shape, sequences=1, targets=task.targets, pad_id=TOKENIZER.pad_id)
    places = {number: (row, slot, start) for number, row, slot, start in packed.places}
    return packed.features, [
        (row, slot, slice(start, start + unit.length))
        for unit, (row, slot, start) in zip(units, map(places.__getitem__, range(len(units))), strict=True)
    ]


def outputs_of(outputs, places):
    """The outputs of every unit, as ``Task.decode`` takes them."""
    arrays = {name: (level, np.asarray(values)) for name, (level, values) in outputs.items()}
    return [
        {name: values[row, slot if level == "unit" else tokens] for name, (level, values) in arrays.items()}
        for row, slot, tokens in places
    ]
