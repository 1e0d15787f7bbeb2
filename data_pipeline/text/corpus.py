"""The source files of a corpus: text files, folders, installed packages and datasets."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path, PurePath

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location, ObjectPath, location
from data_pipeline.text.compressed import COMPRESSIONS
from data_pipeline.text.documents import JSON_SUFFIXES, TEXT_SUFFIXES, Source, json_records, plain_suffix
from data_pipeline.text.lines import binary_kind

# Reports in folders of text that bert-data clean and bert-data wikipedia wrote.
CLEANED_NAME, WIKIPEDIA_NAME = "cleaned.json", "wikipedia.json"
# Names that a folder of this kind contains, which bert-jax or bert-data wrote and which holds no text.
_OUTPUTS = (
    ("shards", {"records.index"}),
    ("shards", {"vocabulary.json", "vocab.txt"}),
    ("a token store", {"store.json", "documents.bin"}),
    ("a workdir", {"config.yaml", "metrics.jsonl"}),
    ("a workdir", {"config.yaml", "checkpoints"}),
    ("a checkpoint", {"commit_success.txt"}),
    ("a model", {"config.json", "model.safetensors"}),
    ("a model", {"config.json", "pytorch_model.bin"}),
    ("a model", {"bert_config.json", "vocab.txt"}),
)
_WIKIEXTRACTOR = re.compile(r"wiki_\d+")  # names of its files, which have no suffix
_TO_TEXT = "save it as plain text (.txt)"
_TO_JSON = "write its texts as JSON lines (.jsonl), in the field data.json_field"
_TO_HF = "save it with save_to_disk of Hugging Face datasets, and use hf:FOLDER"
_UNPACK = "unpack it, and name the folder of its text"
_MARKUP = "extract its text to .txt (of a MediaWiki dump: bert-data wikipedia)"
_REFUSED = {
    **dict.fromkeys((".doc", ".docx", ".odt", ".rtf", ".pdf", ".epub", ".ppt", ".pptx"), _TO_TEXT),
    **dict.fromkeys((".csv", ".tsv", ".xls", ".xlsx"), _TO_JSON),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), _TO_HF),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _UNPACK),
    **dict.fromkeys((".html", ".htm", ".xml"), _MARKUP),
}
_READ = f"allowed: {', '.join((*TEXT_SUFFIXES, *JSON_SUFFIXES))}, plain or {', '.join(COMPRESSIONS)}"


@dataclass(frozen=True)
class LeftOut:
    """A file in a folder or package of the corpus, or a folder in it, that is not read; ``reason`` is "" for a file
    with the suffix of another kind of file."""

    name: str
    reason: str = ""


@dataclass(frozen=True)
class Listing:
    """The sources of a corpus, sorted by name, and the other files in its folders."""

    sources: tuple[Source, ...]
    left_out: tuple[LeftOut, ...] = ()

    def summary(self) -> str:
        """Return one line: the number of files read, and the skipped files by name or suffix."""
        line = f"{len(self.sources):,} {'file' if len(self.sources) == 1 else 'files'} read"
        if not self.left_out:
            return line
        others = Counter(plain_suffix(PurePath(one.name)) or "no suffix" for one in self.left_out if not one.reason)
        parts = [f"{suffix} {count}" for suffix, count in others.most_common(6)]
        parts += ["others"] if len(others) > 6 else []
        named = [f"{one.name} {one.reason}" for one in self.left_out if one.reason]
        parts += [*named[:4], *([f"{len(named) - 4} more"] if len(named) > 4 else [])]
        return f"{line}; skipped: {len(self.left_out):,} ({', '.join(parts)})"


def listing_of(data: DataConfig) -> Listing:
    """List the sources of the corpus that ``data`` names, as :func:`list_corpus` does.

    The folders of shards and of the token store, and the vocabulary, are skipped if they are inside the corpus.
    """
    return list_corpus(
        data.corpus, split=data.dataset_split, tfds_data_dir=data.tfds_data_dir, json_field=data.json_field,
        encoding=data.encoding, outputs=(data.shards, data.eval_shards, data.token_store, data.vocab),
    )  # fmt: skip


def corpus_of(data: DataConfig) -> list[Source]:
    """Return the sources of :func:`listing_of`."""
    return list(listing_of(data).sources)


def list_sources(corpus: Sequence[str], **options: str) -> list[Source]:
    """Return the sources of :func:`list_corpus`."""
    return list(list_corpus(corpus, **options).sources)


def list_corpus(
    corpus: Sequence[str],
    *,
    split: str = "train",
    tfds_data_dir: str = "",
    json_field: str = "text",
    encoding: str = "auto",
    outputs: Iterable[str] = (),
) -> Listing:
    """List the source files of a corpus, sorted by name, and the files of its folders that are skipped.

    An entry of ``corpus`` is a file or a folder (searched recursively), local or in an object store; an installed
    package ``package:NAME``; or a dataset ``tfds:...`` or ``hf:...``, from which ``split`` is read. Folders and
    packages contribute their .txt, .text, .jsonl and .ndjson files, .json files whose first record has a text in
    ``json_field``, and the files wiki_NN of wikiextractor, uncompressed, .gz, .bz2, .xz or .zst. Files and folders
    that this library writes (also those named in ``outputs``) are skipped. A file with an unknown suffix that is
    itself an entry is read as plain text. Raises ``ValueError`` for missing, empty and repeated files, and for
    files that are not text.
    """
    if not corpus:
        raise ValueError("data.corpus: not set; set it to text files, folders, package:NAME, tfds:NAME or hf:NAME")
    found: list[Source | LeftOut] = []
    for entry in corpus:
        if entry.startswith(("tfds:", "hf:")):
            from data_pipeline.text import datasets  # reads with other libraries

            if entry.startswith("tfds:"):
                found += datasets.tfds_sources(entry, data_dir=tfds_data_dir, split=split)
            else:
                found += datasets.hf_sources(entry, split=split)
        elif entry.startswith("package:"):
            found += _in_package(entry, json_field, encoding)
        elif location(entry).is_dir():
            found += _in_folder(entry, json_field, encoding, outputs)
        else:
            found.append(_file_source(entry, encoding))
    sources = [one for one in found if isinstance(one, Source)]
    sources.sort(key=lambda source: (source.name, str(source.path)))
    seen: set[Location] = set()
    for source in sources:
        path = source.path.resolve()
        if path in seen:
            raise ValueError(
                f"{source.path}: the file is in the corpus twice, so training would use held-out text; list it once"
            )
        seen.add(path)
    return Listing(tuple(sources), tuple(one for one in found if isinstance(one, LeftOut)))


def _file_source(entry: str, encoding: str) -> Source:
    """Return the source of a file that is itself an entry. Raises ``ValueError`` if it cannot be read as text."""
    path = location(entry)
    if not path.is_file():
        raise ValueError(f"{entry}: no such file or folder")
    if path.stat().st_size == 0:
        raise ValueError(f"{entry}: the file is empty")
    if remedy := _REFUSED.get(plain_suffix(path)):
        raise ValueError(f"{entry}: a {plain_suffix(path)} file is not read; {remedy}")
    if kind := _binary_kind(path, encoding):
        raise ValueError(f"{entry}: the file is {kind}")
    return Source(path=path, name=path.name, encoding=encoding)


def _in_folder(entry: str, json_field: str, encoding: str, outputs: Iterable[str]) -> list[Source | LeftOut]:
    """Return the files of a folder that are read or skipped, without hidden files."""
    path = location(entry)
    name = path.resolve().name
    files = {file.relative_to(path): file for file in path.rglob("*")}
    files = {one: file for one, file in files.items() if not any(part.startswith(".") for part in one.parts)}
    written = _outputs_in(path, files, outputs)
    left_out = [
        LeftOut(f"{name}/{one.as_posix()}", f"is {kind}")
        for one, kind in written.items()
        if written.keys().isdisjoint(one.parents)
    ]
    texts = {}
    for one, file in files.items():
        if not written.keys().isdisjoint((one, *one.parents)):
            continue
        if not file.is_file():
            if isinstance(file, Path) and file.is_symlink():
                left_out.append(LeftOut(f"{name}/{one.as_posix()}", "is a link that is not followed"))
            continue
        reason = _reason_against(file, json_field, encoding) if _is_text_name(one) else ""
        if reason is None:
            texts[one] = file
        else:
            left_out.append(LeftOut(f"{name}/{one.as_posix()}", reason))
    left_out.sort(key=lambda one: one.name)
    if not texts:
        raise ValueError(f"{entry}: the folder contains no text; {Listing((), tuple(left_out)).summary()}; {_READ}")
    separated = _written_files([*texts.values()])
    kinds = {file: "documents" if file in separated else "auto" for file in texts.values()}
    sources = [
        Source(path=file, name=f"{name}/{one.as_posix()}", blank_lines=kinds[file], encoding=encoding)
        for one, file in texts.items()
    ]
    return [*left_out, *sources]


def _outputs_in(path: Location, relatives: Iterable[PurePath], outputs: Iterable[str]) -> dict[PurePath, str]:
    """Return what this library wrote in the folder ``path``: files and folders relative to it, and their kind."""
    names: dict[PurePath, set[str]] = {}
    for relative in relatives:
        for one in (relative, *relative.parents):
            names.setdefault(one.parent, set()).add(one.name)
    found = {
        folder if folder.parts else PurePath("metrics.jsonl"): kind
        for kind, marks in _OUTPUTS
        for folder, held in names.items()
        if marks <= held
    }
    for output in filter(None, outputs):
        own, place = path.resolve(), location(output).resolve()
        if type(own) is type(place) and own in place.parents:
            found[PurePath(place.relative_to(own))] = "an output of this command"
    return {one: kind for one, kind in found.items() if one in names or one.name in names.get(one.parent, ())}


def _is_text_name(relative: PurePath) -> bool:
    suffix = plain_suffix(relative)
    stem = relative.name[: -len(relative.suffix)] if relative.suffix.lower() in COMPRESSIONS else relative.name
    return suffix in (*TEXT_SUFFIXES, *JSON_SUFFIXES) or _WIKIEXTRACTOR.fullmatch(stem) is not None


def _reason_against(file: Location, json_field: str, encoding: str) -> str | None:
    """Return the reason for which a file with a text suffix is skipped, or None if it is read."""
    if file.name in (CLEANED_NAME, WIKIPEDIA_NAME):
        return "is a report of bert-data"
    if file.stat().st_size == 0:
        return "is empty"
    if kind := _binary_kind(file, encoding):
        return f"is {kind}"
    if plain_suffix(file) == ".json":
        try:
            _, record = next(json_records(Source(path=file, name=file.name, encoding=encoding)), ("", None))
        except ValueError as error:  # a damaged file is not skipped: the build will name the damage
            return "is not JSON" if "not valid JSON" in str(error) else None
        if not isinstance(record, dict) or not isinstance(record.get(json_field), str):
            return f"has no text in field {json_field!r}"
    return None


def _binary_kind(path: Location, encoding: str) -> str:
    """Return the kind of a file that is not text, or "" for text; a compressed file is tested when it is read."""
    if path.suffix.lower() in COMPRESSIONS:
        return ""
    status = path.stat()
    return _kind_of_content(path, encoding, status.st_size, getattr(status, "st_mtime_ns", 0))


@lru_cache(maxsize=1 << 16)
def _kind_of_content(path: Location, encoding: str, size: int, modified: int) -> str:
    """Return the result of :func:`_binary_kind`; a process lists a corpus several times."""
    if isinstance(path, ObjectPath):
        head = path.read_range(0, 4096)
    else:
        with path.open("rb") as file:
            head = file.read(4096)
    return "a vocabulary" if head.startswith((b"[PAD]\n", b"[PAD]\r")) else binary_kind(head, encoding)


def _written_files(files: Sequence[Location]) -> set[Location]:
    """Return the files that are in a folder that ``bert-data`` wrote, at any depth; in these, blank lines separate
    documents."""
    folders = {parent for file in files for parent in file.resolve().parents}
    # The first part of an object's path is its scheme, which is not a folder.
    held = {folder for folder in folders if not (isinstance(folder, ObjectPath) and len(folder.parts) < 2)}
    written = {
        folder for folder in held if (folder / CLEANED_NAME).is_file() or (folder / WIKIPEDIA_NAME).is_file()
    }
    return {file for file in files if not written.isdisjoint(file.resolve().parents)}


def _in_package(entry: str, json_field: str, encoding: str) -> list[Source | LeftOut]:
    """Return the text files of an installed distribution, without importing it; each file is one document."""
    package = entry.removeprefix("package:")
    try:
        distribution = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        raise ValueError(f"{entry}: the package is not installed; run: pip install {package}") from None
    found: list[Source | LeftOut] = []
    for file in distribution.files or []:
        is_metadata = file.parts[0].endswith((".dist-info", ".egg-info")) or file.parts[0] == ".."
        is_hidden = any(part.startswith(".") for part in file.parts)
        path, name = Path(str(distribution.locate_file(file))), f"{entry}/{file.as_posix()}"
        if is_metadata or is_hidden or not _is_text_name(PurePath(file)) or not path.is_file():
            continue
        reason = _reason_against(path, json_field, encoding)
        if reason is None:
            found.append(Source(path=path, name=name, blank_lines="paragraphs", encoding=encoding))
        else:
            found.append(LeftOut(name, reason))
    if not any(isinstance(one, Source) for one in found):
        raise ValueError(f"{entry}: the package contains no text files; {_READ}")
    return found
