"""Identity of the files from which something is built: their names, sizes and contents.

Records of a build hold no times, so that equal builds have equal bytes. The times (or the versions of objects) at
which contents were hashed are kept in :data:`HASHES_NAME`, a hidden file that may be deleted: then all files are
hashed again.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location, ObjectPath
from bert_jax.json_values import Json
from data_pipeline.build.workers import processor_count

HASHES_NAME = ".content-hashes.json"
_DIGITS = 32  # of the sha256 of a file
_THREADS = 8  # most files that are hashed at the same time


def file_settings(
    key: str,
    files: Sequence[tuple[str, Location]],
    folder: Location | None,
    recorded: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """Return the settings that identify ``files``, pairs (name, path), on any machine.

    ``key`` holds [name, size in bytes] for each file, and ``key content`` holds [name, hash of the bytes]. A file
    is read only if its size or its time differs from that in ``folder`` / :data:`HASHES_NAME`, which is written
    (None: each file is read).
    With ``recorded``, the settings of an earlier build, contents are compared only if they were recorded and the
    names and sizes are equal.
    """
    sizes: list[Json] = [[name, path.stat().st_size] for name, path in files]
    settings: dict[str, Json] = {key: sizes}
    content = f"{key} content"
    if recorded is None or (content in recorded and recorded.get(key) == sizes):
        hashes = _hashes([path for _, path in files], folder)
        settings[content] = [[name, digest] for (name, _), digest in zip(files, hashes, strict=True)]
    return settings


def _hashes(paths: Sequence[Location], folder: Location | None) -> list[str]:
    """Return the hash of every file, from the file of hashes in ``folder`` if the file is unchanged."""
    known = {} if folder is None else _read(folder / HASHES_NAME)
    # Hashed, because a folder of shards must not tell the paths of the machine.
    places = [hashlib.sha256(str(path.absolute()).encode("utf-8", "surrogateescape")).hexdigest() for path in paths]
    versions = list(map(_version, paths))  # before the files are read: an edit in between is then noticed
    absent = [i for i, place in enumerate(places) if known.get(place, [""])[0] != versions[i]]
    if not absent and len(known) == len(set(places)):
        return [known[place][1] for place in places]
    with ThreadPoolExecutor(min(_THREADS, processor_count())) as pool:
        found = dict(zip(absent, pool.map(_hash, (paths[i] for i in absent)), strict=True))
    hashes = [found.get(i) or known[place][1] for i, place in enumerate(places)]
    state = {place: [version, digest] for place, version, digest in zip(places, versions, hashes, strict=True)}
    if folder is not None:
        with contextlib.suppress(OSError):  # shards that may only be read are checked all the same
            write_whole(folder / HASHES_NAME, json.dumps(state, sort_keys=True) + "\n")
    return hashes


def _read(path: Location) -> dict[str, list[str]]:
    try:
        state = json.loads(path.read_bytes())
        return {place: [str(version), str(digest)] for place, (version, digest) in state.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _version(path: Location) -> str:
    if isinstance(path, ObjectPath):
        return path.version()
    facts = path.stat()
    return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def _hash(path: Location) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]  # type: ignore[arg-type]
