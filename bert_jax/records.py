"""Records of fine-tuning tasks. File readers create records; tasks convert them to arrays. This module does not
import jax."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a question: its text, and the offset of its first character in the passage (-1: unknown)."""

    text: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line or entry of a task file; fields that its format lacks are empty.

    Labels are strings, as in the file. The task converts them to class indices or values; if a label is invalid,
    the error message of the task names ``source``. ``None`` means that the split has no labels (a test set).
    """

    id: str
    # Location of the record, "FILE:LINE" or "FILE: id X", for messages.
    source: str
    # First text; the question in question answering, the text that the choices continue in multiple choice.
    text: str = ""
    # Second text; the passage in question answering, the other sentence in sentence pairs.
    text_pair: str | None = None
    # Texts that are dissimilar to the first text (triplets, hard negatives).
    negatives: tuple[str, ...] = ()
    # Class or value; in multiple choice the index of the correct choice, from 0.
    label: str | None = None
    # All classes that apply, in multi-label tasks.
    labels: tuple[str, ...] | None = None
    # Words of a tagged text, and one tag per word.
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    choices: tuple[str, ...] = ()
    # Correct answers; () if the passage contains no answer, None without labels.
    answers: tuple[Answer, ...] | None = None
    # Records of one group (article, document, person) stay together when the training records are split into train
    # and dev.
    group: str = ""
