"""Options of ``bert-data clean``, and the numbers of bands and rows that follow from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from bert_jax.config.schema import AtLeast0, Section, Share, require_encoding
from bert_jax.json_values import Json

MOST_HASHES = 128  # MinHash values per document
LEAST_CHANCE = 0.98  # of a pair at the threshold to become a candidate


@dataclass(frozen=True, kw_only=True)
class CleanDataConfig(Section, prefix="data."):
    """Text to clean."""

    # Texts to clean. The entries are those of bert-data shards: files or folders, local or gs:// (.txt, .jsonl or
    # .json, plain or compressed), package:NAME, tfds:NAME[/CONFIG][:VERSION], hf:OWNER/NAME[/CONFIG] or hf:FOLDER.
    corpus: tuple[str, ...] = ()
    # Field that contains the text in JSON records and in the records of tfds: and hf: datasets.
    json_field: str = "text"
    # Character encoding of all text files, such as cp1252, latin-1 or gb18030; auto: UTF-8, or, for files with a
    # byte order mark, UTF-16 or UTF-32.
    encoding: str = "auto"
    # Split of a tfds: or hf: dataset to clean.
    dataset_split: str = "train"
    # Folder of prepared TensorFlow Datasets, local or gs://; empty: ~/tensorflow_datasets.
    tfds_data_dir: str = ""
    # Number of processes; 0: one per processor. The output does not depend on this number.
    workers: AtLeast0[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_encoding("data.encoding", self.encoding)


@dataclass(frozen=True, kw_only=True)
class CleanConfig(Section, prefix="clean."):
    """Rules, in the order in which they are applied."""

    # What happens to broken encoding. repair: correct mojibake, remove control characters, and drop lines that
    # contain the replacement character. drop: drop all lines with one of these three errors. off: keep the text.
    encoding: Literal["repair", "drop", "off"] = "repair"
    # Maximum share of the characters of a document that may be in lines dropped because of their encoding; a
    # document with a larger share is dropped as a whole.
    broken_share: Share[float] = 0.2
    # Minimum number of words in a document; 0: off. Each Chinese character counts as a word.
    least_words: AtLeast0[int] = 5
    # Maximum number of words in a document; 0: off.
    most_words: AtLeast0[int] = 0
    # Codes of the languages to keep, such as en de zh; py3langid detects the language from the first 2,000
    # characters of a document. Empty: all languages.
    languages: tuple[str, ...] = ()
    # Drop documents whose text equals the text of an earlier document.
    exact_duplicates: bool = True
    # A line that occurs in at least this number of different documents is boilerplate, and is dropped from all of
    # these documents except the first; 0: off. Case, punctuation and white space are ignored.
    boilerplate: AtLeast0[int] = 10
    # Minimum number of words in a boilerplate line; shorter lines, such as "I don't know.", are kept.
    boilerplate_words: AtLeast0[int] = 5
    # Drop a document if its Jaccard similarity to an earlier document that is kept is at least this number; 0:
    # off. The similarity is computed from the sets of 5-grams of words.
    near_duplicates: Share[float] = 0.7
    # Number of bands of the MinHash signature; 0: selected together with clean.rows.
    bands: AtLeast0[int] = 0
    # Number of rows per band. 0: the largest number with which, using at most 128 hashes, a pair whose similarity
    # is clean.near_duplicates is compared with a probability of at least 0.98.
    rows: AtLeast0[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("boilerplate", self.boilerplate != 1, "0 (off), or 2 or more documents")
        self._require("most_words", self.most_words in (0, max(self.most_words, self.least_words)),
                      f"0 (off), or at least clean.least_words ({self.least_words})")  # fmt: skip
        self._require("rows", (self.bands == 0) == (self.rows == 0),
                      f"a number above 0 exactly if clean.bands is (clean.bands: {self.bands})")  # fmt: skip

    @property
    def banding(self) -> tuple[int, int]:
        """Return the number of bands and the number of rows per band."""
        if self.bands:
            return self.bands, self.rows
        choices = [(MOST_HASHES // rows, rows) for rows in range(1, MOST_HASHES + 1)]
        return next(
            (choice for choice in reversed(choices) if chance(self.near_duplicates, *choice) >= LEAST_CHANCE),
            choices[0],
        )


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """Options of ``bert-data clean``: the text, and the rules in the order in which they are applied."""

    data: CleanDataConfig = CleanDataConfig()
    clean: CleanConfig = CleanConfig()


def chance(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two sets with this Jaccard similarity agree in all rows of at least one band."""
    return 1 - (1 - similarity**rows) ** bands


def settings_of(options: CleanOptions, corpus: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings that determine the output; ``data.workers`` is not among them. ``corpus`` identifies the
    text."""
    bands, rows = options.clean.banding
    values = {f"clean.{name}": value for name, value in asdict(options.clean).items()}
    return values | {
        "clean.bands": bands,
        "clean.rows": rows,
        "clean.languages": sorted(options.clean.languages),
        "data.json_field": options.data.json_field,
        **({} if options.data.encoding == "auto" else {"data.encoding": options.data.encoding}),
        **corpus,
    }
