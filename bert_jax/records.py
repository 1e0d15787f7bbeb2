"""One example of a fine-tuning task, between the reader of a file and the task that makes arrays of it. No jax."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a question: its text and its first character in the passage (-1: not known)."""

    text: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a reader found in one line or entry; what its format has not is empty.

    Labels are text as the file has it: the task turns them into class numbers or values, and says ``source`` where
    one does not fit. ``None`` means that the split has no labels (a test set).
    """

    id: str
    # Where it was found, "FILE:LINE" or "FILE: id X", for messages.
    source: str
    # First text; of question answering the question, of multiple choice what the choices go on from.
    text: str = ""
    # Second text; of question answering the passage; of sentence pairs the other sentence.
    text_pair: str | None = None
    # Further texts that are not like the first (triplets, hard negatives).
    negatives: tuple[str, ...] = ()
    # Class or value; of multiple choice the number of the right one, from 0.
    label: str | None = None
    # All classes that hold, where several may.
    labels: tuple[str, ...] | None = None
    # Words of a text that is tagged, and a tag for each.
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    choices: tuple[str, ...] = ()
    # Right answers; () for a question that has none in its passage, None without labels.
    answers: tuple[Answer, ...] | None = None
    # What must not be torn apart by a split into train and dev: article, document, person.
    group: str = ""
