"""The source files of a corpus: text files, folders, installed packages and datasets."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location, ObjectPath, location
from data_pipeline.text.datasets import hf_sources, tfds_sources
from data_pipeline.text.documents import Source, is_text_file

# Reports in folders of text that bert-data clean and bert-data wikipedia wrote.
CLEANED_NAME, WIKIPEDIA_NAME = "cleaned.json", "wikipedia.json"


def corpus_of(data: DataConfig) -> list[Source]:
    """List the sources of the corpus that ``data`` names, as :func:`list_sources` does."""
    return list_sources(data.corpus, split=data.dataset_split, tfds_data_dir=data.tfds_data_dir)


def list_sources(corpus: Sequence[str], *, split: str = "train", tfds_data_dir: str = "") -> list[Source]:
    """List the source files of a corpus, sorted by name.

    An entry of ``corpus`` is a file or a folder (searched recursively), local or in an object store; an installed
    package ``package:NAME``; or a dataset ``tfds:...`` or ``hf:...``, from which ``split`` is read. Folders and
    packages contribute their .txt, .jsonl and .ndjson files, uncompressed, .gz or .zst. A file with another suffix
    that is itself an entry is read as plain text. Raises ``ValueError`` for missing, empty and repeated files.
    """
    if not corpus:
        raise ValueError("data.corpus: not set; set it to text files, folders, package:NAME, tfds:NAME or hf:NAME")
    sources = [source for entry in corpus for source in _sources_of(entry, split, tfds_data_dir)]
    sources.sort(key=lambda source: (source.name, str(source.path)))
    seen: set[Location] = set()
    for source in sources:
        path = source.path.resolve()
        if path in seen:
            raise ValueError(
                f"{source.path}: the file is in the corpus twice, so training would use held-out text; list it once"
            )
        seen.add(path)
    return sources


def _sources_of(entry: str, split: str, tfds_data_dir: str) -> list[Source]:
    if entry.startswith("package:"):
        return _package_sources(entry)
    if entry.startswith("tfds:"):
        return tfds_sources(entry, data_dir=tfds_data_dir, split=split)
    if entry.startswith("hf:"):
        return hf_sources(entry, split=split)
    path = location(entry)
    if path.is_dir():
        files = [file for file in path.rglob("*") if is_text_file(file.relative_to(path)) and file.is_file()]
        files = [file for file in files if file.stat().st_size > 0]
        if not files:
            raise ValueError(f"{entry}: the folder contains no text; allowed: .txt and .jsonl, plain or .gz/.zst")
        name, written = path.resolve().name, _written_files(files)
        return [
            Source(
                path=file,
                name=f"{name}/{file.relative_to(path).as_posix()}",
                blank_lines="documents" if file in written else "auto",
            )
            for file in files
        ]
    if not path.is_file():
        raise ValueError(f"{entry}: no such file or folder")
    if path.stat().st_size == 0:
        raise ValueError(f"{entry}: the file is empty")
    return [Source(path=path, name=path.name)]


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


def _package_sources(entry: str) -> list[Source]:
    """List the text files of an installed distribution without importing it; each file is one document."""
    package = entry.removeprefix("package:")
    try:
        distribution = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        raise ValueError(f"{entry}: the package is not installed; run: pip install {package}") from None
    sources = []
    for file in distribution.files or []:
        is_metadata = file.parts[0].endswith((".dist-info", ".egg-info")) or file.parts[0] == ".."
        path = Path(str(distribution.locate_file(file)))
        if not is_metadata and is_text_file(Path(*file.parts)) and path.is_file():
            sources.append(Source(path=path, name=f"{entry}/{file.as_posix()}", blank_lines="paragraphs"))
    if not sources:
        raise ValueError(f"{entry}: the package contains no text files; allowed: .txt and .jsonl")
    return sources
