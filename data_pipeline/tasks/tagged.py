"""Readers of tagged words: CoNLL columns, JointBERT folders and SNIPS lines."""

from collections.abc import Iterator

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.conll import conll_sentences
from bert_jax.io.storage import Location
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, blank_separated, check_tag_count
from data_pipeline.tasks.task_files import find, find_file, plain_name, read_lines, without_blank_end

# ------------------------------------------------------------------ CoNLL


def read_conll(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield the sentences of a file with one word per line; a blank line ends a sentence.

    Columns are separated by tabs or, in a line without tabs, by spaces. The word is in the first column and the tag
    in the last (.conllu: FORM and UPOS), unless ``words=N`` or ``tags=N`` is set. ``group`` is the document
    (FILE:NUMBER), which begins at a -DOCSTART- line; without such lines, each sentence is a document. In .conllu
    files, comments, multiword ranges and empty nodes are ignored, and a ``# newdoc`` comment begins a document; in
    other files, "#" is a word.
    """
    path = find_file(name)
    is_conllu = plain_name(path.name).suffix == ".conllu"
    word, tag = _conll_columns(columns, is_conllu=is_conllu)
    sentences = list(conll_sentences(read_lines(path, data.encoding), is_conllu=is_conllu))
    has_documents = any(sentence.document for sentence in sentences)
    for number, sentence in enumerate(sentences):
        words, tags = [], []
        for line, fields in sentence.rows:
            if is_conllu and not fields[0].isdecimal():
                raise ValueError(
                    f"{path}:{line}: id {fields[0][:40]!r} is not allowed; allowed in .conllu: integers, ranges "
                    "(1-2), empty nodes (1.1); give the file another suffix if it has other columns"
                )
            too_few = len(fields) < max(word, tag) + 1 or (tag < 0 and len(fields) < 2)
            if too_few and (len(fields) <= word or columns.needs_labels):
                needed = max(word, tag, 1) + 1
                raise ValueError(
                    f"{path}:{line}: {len(fields)} column(s); the word and its tag require {needed} or more; to "
                    "choose their columns, set words=N and tags=N in data.columns"
                )
            words.append(fields[word])
            tags += [] if too_few else [fields[tag]]
        record = Record(
            id=str(number), source=f"{path}:{sentence.line}", words=tuple(words), tags=tuple(tags) or None,
            group=f"{path}:{sentence.document if has_documents else number}",
        )  # fmt: skip
        check_tag_count(record)
        yield record


def _conll_columns(columns: Columns, *, is_conllu: bool) -> tuple[int, int]:
    """Return the indices of the word and tag columns (-1: the last); by default FORM and UPOS in CoNLL-U files."""
    where = {"words": 1, "tags": 3} if is_conllu else {"words": 0, "tags": -1}
    for role, column in columns.roles:
        if role not in where or not column.isdecimal() or not 0 < int(column[:19]) < 10**9:
            raise ValueError(f"data.columns: {role}={column} is not allowed; allowed for conll: words=N, tags=N")
        where[role] = int(column) - 1
    return where["words"], where["tags"]


# ------------------------------------------------------------------ intent and slots


def read_slots(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield the records of a JointBERT folder, one per line of seq.in (words), seq.out (tags) and label (intent).

    The files seq.out and label may be missing in a test split; label may also be missing for tagging.
    """
    folder = find(name)
    if not folder.is_dir():
        raise ValueError(f"{folder}: the path is a file; give a folder with seq.in, seq.out and label")
    texts = _lines(folder / "seq.in", data) or []
    needed = columns.needs_labels
    tags = _lines(folder / "seq.out", data, needed=needed)
    labels = _lines(folder / "label", data, needed=needed and columns.kind != "tagging")
    for other, lines in (("seq.out", tags), ("label", labels)):
        if lines is not None and len(lines) != len(texts):
            raise ValueError(
                f"{folder / other}: {len(lines)} lines, but seq.in has {len(texts)}; "
                "the numbers of lines must be equal"
            )
    for number, text in enumerate(texts):
        words = blank_separated(text)
        own_tags = None if tags is None else blank_separated(tags[number])
        if own_tags is not None and len(own_tags) != len(words):
            raise ValueError(
                f"{folder / 'seq.out'}:{number + 1}: {len(own_tags)} tags for the {len(words)} words of seq.in; "
                "every word needs one tag"
            )
        yield Record(
            id=str(number), source=f"{folder / 'seq.in'}:{number + 1}", text=text.strip(" \t"), words=tuple(words),
            tags=None if own_tags is None else tuple(own_tags),
            label=None if labels is None else labels[number].strip() or None,
        )  # fmt: skip


def _lines(path: Location, data: TaskDataConfig, *, needed: bool = True) -> list[str] | None:
    if not needed and not path.is_file():
        return None
    return [line for _, line in without_blank_end(read_lines(find_file(str(path)), data.encoding))]


def read_snips(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record per line, such as ``word:tag word:tag <=> intent``.

    The tag of a word follows its last colon.
    """
    path = find_file(name)
    for number, (line, text) in enumerate(without_blank_end(read_lines(path, data.encoding))):
        pairs, arrow, intent = text.rpartition("<=>")
        tagged = [part.rpartition(":") for part in blank_separated(pairs)]
        if not arrow or not intent.strip() or not tagged or not all(colon for _, colon, _ in tagged):
            raise ValueError(f"{path}:{line}: {text[:60]!r} does not have the form word:tag word:tag <=> intent")
        words = tuple(word for word, _, _ in tagged)
        yield Record(
            id=str(number), source=f"{path}:{line}", text=" ".join(words), words=words,
            tags=tuple(tag for _, _, tag in tagged), label=intent.strip(),
        )  # fmt: skip
