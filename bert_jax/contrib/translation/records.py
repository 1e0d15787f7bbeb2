"""Records of translation: pairs of a text and its translation, from files and from Python."""

from collections.abc import Iterable
from pathlib import Path

from bert_jax.commands.finetune import Records, read_files
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.io.text_lines import numbered_lines, opened
from bert_jax.records import Record

# Between the names of two files, whose lines are the texts and their translations.
AND = "+"


def pairs(texts: Iterable[str], translations: Iterable[str] | None = None, name: str = "pair") -> list[Record]:
    """Return the records of ``texts`` and their ``translations`` (None: unknown), in order. ``name`` and a number,
    from 1, name a record in messages. Raises ``ValueError`` if the numbers of texts differ."""
    texts = list(texts)
    others = [None] * len(texts) if translations is None else list(translations)
    if len(texts) != len(others):
        raise ValueError(f"{name}: {len(texts):,} texts, but {len(others):,} translations; give one for each text")
    both = enumerate(zip(texts, others, strict=True))
    return [Record(id=f"{i}", source=f"{name}:{i + 1}", text=text, label=other) for i, (text, other) in both]


def read_records(config: FinetuneConfig) -> Records:
    """Return the records of the files that the section data names, and the names of the splits for tests.

    A file has the columns text and label, in any format of ``data.format``. SOURCE+TARGET names two files that
    correspond line by line (gzip if a name ends in .gz). Raises ``ValueError`` for an invalid file.
    """
    data = config.data
    names = {split: getattr(data, split) for split in ("train", "dev", "test")}
    given = [name for own in names.values() for name in own]
    if not any(AND in name for name in given):
        return read_files(config)
    if alone := next((name for name in given if AND not in name), ""):
        raise ValueError(f"{alone}: not allowed with SOURCE{AND}TARGET; give two files of lines for every split")
    several = [split for split, own in names.items() if split != "train" and len(own) > 1]
    if several or data.dev_fraction:
        what = f"data.{several[0]}: {len(names[several[0]])} entries" if several else "data.dev_fraction"
        raise ValueError(f"{what}: not allowed with SOURCE{AND}TARGET; give one entry of two files, or columns")
    limits = {"train": data.train_limit, "dev": data.dev_limit, "test": 0}
    splits = {
        split: [record for name in own for record in _of_lines(Path(data.dir), name)][: limits[split] or None]
        for split, own in names.items()
        if own
    }
    return splits, [split for split in splits if split == "test"]


def _of_lines(folder: Path, name: str) -> list[Record]:
    parts = name.split(AND)
    if len(parts) != 2:
        raise ValueError(f"{name}: {len(parts)} files; give two, SOURCE{AND}TARGET")
    sides = []
    for path in (folder / part for part in parts):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give SOURCE{AND}TARGET, relative to data.dir")
        with opened(path) as stream:
            sides.append([line for _, line in numbered_lines(stream, path)])
    return pairs(sides[0], sides[1], name)
