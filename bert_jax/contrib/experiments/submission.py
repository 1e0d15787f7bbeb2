"""Files for the GLUE leaderboard (Wang et al. 2018; gluebenchmark.com/faq) from the predictions of runs.

Every file has the header ``index<TAB>prediction`` and a line for each record of the official test set.
"""

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.finetuning.artifacts import predicted_splits, read_predictions, stored_options
from bert_jax.io.files import whole_file, write_whole
from bert_jax.io.storage import Location

ZIP = "submission.zip"
_BINARY, _TWO, _THREE = ("0", "1"), ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction")


class GlueFile(NamedTuple):
    """The leaderboard file of a test set: its name without .tsv, its number of records, and its classes.

    ``classes`` is empty if the predictions are numbers.
    """

    name: str
    records: int
    classes: tuple[str, ...] = ()


# Files by ``task.name`` and split, as the recipes name them.
FILES = {
    "cola": {"test": GlueFile("CoLA", 1_063, _BINARY)},
    "sst2": {"test": GlueFile("SST-2", 1_821, _BINARY)},
    "mrpc": {"test": GlueFile("MRPC", 1_725, _BINARY)},
    "stsb": {"test": GlueFile("STS-B", 1_379)},
    "mnli": {
        "test_matched": GlueFile("MNLI-m", 9_796, _THREE),
        "test_mismatched": GlueFile("MNLI-mm", 9_847, _THREE),
        "AX": GlueFile("AX", 1_104, _THREE),
    },
    "qnli": {"test": GlueFile("QNLI", 5_463, _TWO)},
    "qqp": {"test": GlueFile("QQP", 390_965, _BINARY)},
    "rte": {"test": GlueFile("RTE", 3_000, _TWO)},
    "wnli": {"test": GlueFile("WNLI", 146, _BINARY)},
}
# Smallest and largest value of STS-B.
_LEAST, _LARGEST = 0.0, 5.0


def write_submission(workdirs: Iterable[Location], output: Path) -> list[str]:
    """Write a file for every test set with predictions in ``workdirs``, and ``submission.zip`` with these files.

    All predictions are checked before the first file is written. Returns lines to print, which name the missing
    files. Raises ``ValueError`` for a run whose task is not a GLUE task or that has no predictions of its test
    sets, for an index that is missing, repeated or too large, and for a class that the leaderboard does not accept.
    """
    files: dict[str, str] = {}
    sources: dict[str, Location] = {}
    for workdir in workdirs:
        task = stored_options(workdir, ("task.kind", "task.name")).task.name
        if task not in FILES:
            raise ValueError(f"{workdir}: task.name {task!r} is not a GLUE task; allowed: {', '.join(FILES)}")
        predicted, splits = predicted_splits(workdir), FILES[task]
        # If none of these splits has predictions, reading the first one raises an error that names the others.
        for split in [each for each in splits if each in predicted] or list(splits)[:1]:
            name = splits[split].name
            if name in sources:
                raise ValueError(
                    f"{workdir}: {sources[name]} already provides {name}.tsv; use only one of the two workdirs"
                )
            sources[name] = workdir
            files[name] = _file(workdir, split, splits[split])
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(output / f"{name}.tsv", text)
    with whole_file(output / ZIP) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.tsv", text)
    wanted = [one.name for splits in FILES.values() for one in splits.values()]
    missing = [name for name in wanted if name not in files]
    lines = [f"{output / name}.tsv: {text.count(chr(10)) - 1:,} predictions" for name, text in files.items()]
    lacks = f", not ready to upload: the leaderboard also requires {', '.join(missing)}" if missing else ""
    return [*lines, f"{output / ZIP}: {len(files)} of {len(wanted)} files{lacks}"]


def _file(workdir: Location, split: str, wanted: GlueFile) -> str:
    """Return the content of a file: the predictions of ``split``, sorted by index."""
    last = wanted.records - 1
    numbers = {str(number): number for number in range(wanted.records)}
    answers: list[str | None] = [None] * wanted.records
    for where, line in read_predictions(workdir, split):
        identity = line.get("id")
        number = numbers.get(identity) if isinstance(identity, str) else None
        if number is None or answers[number] is not None:
            wrong = "is not allowed" if number is None else "occurs twice"
            raise ValueError(
                f"{where}: index {identity!r} {wrong} in {wanted.name}; the GLUE test file has the indices 0 to "
                f"{last:,}, each once"
            )
        answers[number] = _answer(line.get("label" if wanted.classes else "value"), wanted, where)
    if None in answers:
        raise ValueError(
            f"{workdir}: {wanted.records - answers.count(None):,} predictions of {split}, but {wanted.name} has "
            f"{wanted.records:,}: index {answers.index(None)} is missing; predict all records of the GLUE test file"
        )
    return "".join(["index\tprediction\n", *(f"{number}\t{answer}\n" for number, answer in enumerate(answers))])


def _answer(prediction: Any, wanted: GlueFile, where: str) -> str:
    """Return a prediction in the format of the leaderboard; numbers are clipped to the range of STS-B, 0 to 5."""
    if wanted.classes:
        if prediction not in wanted.classes:
            raise ValueError(
                f"{where}: prediction {prediction!r} is not a class of {wanted.name}; allowed: "
                f"{', '.join(wanted.classes)}; use a run trained on the GLUE files"
            )
        return str(prediction)
    if isinstance(prediction, bool) or not isinstance(prediction, int | float) or not math.isfinite(prediction):
        raise ValueError(f"{where}: prediction {prediction!r} of {wanted.name} is not allowed; use a finite number")
    return f"{min(max(prediction, _LEAST), _LARGEST):.6f}"
