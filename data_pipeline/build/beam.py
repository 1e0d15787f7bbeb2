"""Shards built under Apache Beam: the jobs of the process pool as one pipeline, for corpora beyond one machine.

    files of text -> tokenized chunks -> token store -> parts -> shards -> index and manifest

Only numbers pass between the steps; all else is in files, which the workers and the machine that starts the
pipeline see under the same names, on a shared file system or in an object store. So no runner moves data, and a
result that one loses is noticed. Chunks, parts and shards that are finished are kept when a pipeline is run again.
"""

import contextlib
import dataclasses
import io
import logging
import os
import pickle
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.shard_jobs import merge_shard, write_part
from data_pipeline.build.shard_split import PreparedSplit, plan_splits
from data_pipeline.build.token_store import (
    META_NAME,
    TokenStore,
    cached_tokenizer,
    chunk_folder,
    cut_documents,
    merge_chunks,
    remove_chunks,
    store_folder,
    store_settings,
    tokenize_chunk,
)
from data_pipeline.build.workers import processor_count
from data_pipeline.shards.shard_files import MANIFEST_NAME
from data_pipeline.text.documents import Source

_SHARE_BYTES = 4 << 20  # of a source that are one job's, at least
_MOST_SHARES = 8  # of one source


def build_with_beam(
    data: DataConfig, vocab: Location, tokenizer: Tokenizer, sources: Sequence[Source], missing: Sequence[str],
    options: Sequence[str], report: Callable[[str], None],
) -> None:  # fmt: skip
    """Build the splits ``missing``, and the token store if it is not there. The caller holds their folders.

    ``options`` are Beam's own; without a ``--runner`` among them its embedded one runs with ``data.workers``
    threads. What a job raises is raised here; ``ValueError`` (one line) when the pipeline fails otherwise.
    """
    beam, chosen = load_beam(), check_options(data, options)
    places = {name: getattr(data, name) for name in ("shards", "eval_shards", "token_store")}
    data = dataclasses.replace(data, **{name: str(_absolute(location(p))) for name, p in places.items() if p})
    sources = [dataclasses.replace(source, path=_absolute(source.path)) for source in sources]
    jobs = _Jobs(location(data.shards) / f".build-beam-{uuid.uuid4().hex[:8]}")
    jobs.folder.mkdir(parents=True)
    settings = store_settings(data, tokenizer, sources)
    has_store = (store_folder(data) / META_NAME).is_file()
    chunks = None if has_store else chunk_folder(store_folder(data), settings, sources, "each source")
    vocab = _shared_copy(vocab, jobs.folder)
    _save(_Plan(data, vocab, tuple(sources), tuple(missing), settings, chunks), jobs.folder / "plan")
    size = sum(source.path.stat().st_size for source in sources)
    report(f"building from {size / 1e6:,.1f} MB under Apache Beam ({chosen.get_all_options()['runner']})")
    output = _WithoutTracebacks(sys.stderr)
    try:
        with contextlib.ExitStack() as stack:
            if _is_embedded(options):
                stack.enter_context(contextlib.redirect_stderr(output))  # type: ignore[type-var]
            _add_steps(beam, stack.enter_context(beam.Pipeline(options=chosen)), jobs, has_store=has_store)
    except Exception as error:
        for failure in jobs.folder.glob("failure-*"):
            raise _load(failure) from None
        sys.stderr.write(output.held)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"the Beam pipeline failed: {lines[-1]}; what is finished is kept: run again") from None
    for name in missing:
        report(_load(jobs.folder / f"{name}-done"))


def load_beam() -> Any:
    """Apache Beam, imported without its messages; ``ValueError`` if it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import apache_beam
    except ImportError:
        raise ValueError("--runner beam: Apache Beam is not installed; run: pip install 'bert_jax[beam]'") from None
    finally:
        logging.disable(before)
    return apache_beam


def _is_embedded(options: Sequence[str]) -> bool:
    return not any(option.partition("=")[0] == "--runner" for option in options)


def check_options(data: DataConfig, options: Sequence[str]) -> Any:
    """Beam's options from a command line. Without a runner among them: for the embedded one, with ``data.workers``
    threads.

    ``ValueError`` for a wrong value, and for an unknown name (other runners have names of their own).
    """
    load_beam()
    workers = data.workers or processor_count() if _is_embedded(options) else 0
    from apache_beam.options.pipeline_options import PipelineOptions

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers:
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
        embedded = [
            "--runner=FnApiRunner",
            "--direct_running_mode=multi_threading",
            "--default_sdk_harness_log_level=ERROR",
        ]
        options = [*embedded, f"--direct_num_workers={workers}", *options]
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            chosen = PipelineOptions(list(options))
            known = chosen.get_all_options()
            unknown = sorted(set(chosen.get_all_options(retain_unknown_options=True)) - set(known))
    except SystemExit:
        line = messages.getvalue().strip().splitlines()[-1].rpartition("error: ")[2]
        raise ValueError(f"command line, after --: {line}") from None
    if workers and unknown:
        raise ValueError(f"command line, after --: {unknown[0]}: no option of Apache Beam")
    return chosen


class _WithoutTracebacks:
    """Standard error without the tracebacks that Beam's embedded workers print of what is reported in one line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.held, self._holds = "", False

    def write(self, text: str) -> None:
        is_end = text == "\n" and self._holds  # print writes it apart
        self._holds = text.startswith("Traceback (")
        if self._holds:
            self.held = text
        elif not is_end:
            self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def _add_steps(beam: Any, pipeline: Any, jobs: "_Jobs", *, has_store: bool) -> None:
    """The pipeline. ``Reshuffle`` lets all workers share in what follows it; lists and sums wait for all before."""
    if has_store:
        store = pipeline | "start" >> beam.Create([0])
    else:
        store = (
            pipeline
            | "text" >> beam.Create(range(len(jobs.plan.shares)))
            | "spread text" >> beam.Reshuffle()
            | "tokenize" >> beam.Map(jobs.tokenize)
            | "all chunks" >> beam.combiners.ToList()
            | "store" >> beam.Map(jobs.merge_chunks)
        )
    (
        store
        | "splits" >> beam.FlatMap(jobs.prepare)
        | "spread parts" >> beam.Reshuffle()
        | "part" >> beam.Map(jobs.write_part)
        | "all parts" >> beam.CombinePerKey(sum)
        | "shards" >> beam.FlatMap(jobs.list_shards)
        | "spread shards" >> beam.Reshuffle()
        | "shard" >> beam.Map(jobs.merge_shard)
        | "all shards" >> beam.CombinePerKey(sum)
        | "finish" >> beam.Map(jobs.finish)
    )


# ------------------------------------------------------------------ shared by the jobs


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Inputs of a pipeline; a file, since a pipeline's description must stay small."""

    data: DataConfig
    vocab: Location
    sources: tuple[Source, ...]
    missing: tuple[str, ...]
    settings: dict[str, Any]  # of the token store
    chunks: Location | None  # folder of tokenized text; None: the store is there

    @property
    def shares(self) -> list[tuple[int, int, int]]:
        """Shares of text, one a job: (source, k, n) are the pieces k, k + n, ... of a source.

        Each of the n jobs reads the whole source, so they are few: many files suit many workers better than one
        large file."""
        sizes = (size for _, size in self.settings["data.corpus"])
        counts = [min(max(1, size // _SHARE_BYTES), _MOST_SHARES) for size in sizes]
        return [(source, k, n) for source, n in enumerate(counts) for k in range(n)]


def _absolute(place: Location) -> Location:
    """``place`` as a name that does not depend on the working folder."""
    return place.absolute() if isinstance(place, Path) else place


def _shared_copy(vocab: Location, folder: Location) -> Location:
    copy = folder / vocab.name
    if isinstance(copy, ObjectPath):
        copy.upload(local_copy(vocab))
    else:
        shutil.copyfile(local_copy(vocab), copy)
    return copy


def _save(value: Any, path: Location) -> None:
    write_whole(path, pickle.dumps(value))


@lru_cache(maxsize=16)
def _load(path: Location) -> Any:
    """Load a value of ``_save``; a pipeline's folder is its own, so nothing there changes."""
    return pickle.loads(path.read_bytes())


def _chunk_name(source: int, piece: int) -> str:
    return f"{source:06d}-{piece:06d}.npz"


def _expect(wanted: int, found: int) -> None:
    if found != wanted:
        raise ValueError(f"Apache Beam passed on {found} of {wanted} results; what is finished is kept: run again")


class _Jobs:
    """The steps of a pipeline as functions that may run on any machine, and twice."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder

    @property
    def plan(self) -> _Plan:
        return _load(self.folder / "plan")

    def _split(self, name: str) -> PreparedSplit:
        return _load(self.folder / name)

    @contextlib.contextmanager
    def _failure_kept(self) -> Iterator[None]:
        """Runners pass on no exception, only texts: the one that a job raises is kept in a file."""
        try:
            yield
        except (ValueError, OSError) as error:
            _save(error, self.folder / f"failure-{uuid.uuid4().hex[:8]}")
            raise

    def tokenize(self, number: int) -> tuple[int, int]:
        """Tokenize a share of a source; returns its number and how many pieces the source has."""
        plan = self.plan
        data, (source, first, step) = plan.data, plan.shares[number]
        assert plan.chunks is not None
        pieces = 0
        with self._failure_kept():
            for piece, documents in enumerate(cut_documents([plan.sources[source]], data)):
                pieces += 1
                path = plan.chunks / _chunk_name(source, piece)
                if piece % step == first and not path.exists():
                    tokenize_chunk(path, documents, str(plan.vocab), data.lower_case, data.word_segmenter)
        return number, pieces

    def merge_chunks(self, done: list[tuple[int, int]]) -> int:
        """Make the token store of all chunks."""
        plan, pieces = self.plan, dict(done)
        assert plan.chunks is not None
        folder = store_folder(plan.data)
        with self._failure_kept():
            if not (folder / META_NAME).is_file():
                _expect(len(plan.shares), len(pieces))
                counts = {source: pieces[i] for i, (source, _, _) in enumerate(plan.shares)}
                names = [_chunk_name(source, piece) for source, n in counts.items() for piece in range(n)]
                merge_chunks(folder, [plan.chunks / name for name in names], plan.settings, self._tokenizer)
            remove_chunks(folder)
        return 0

    @property
    def _tokenizer(self) -> Tokenizer:
        return cached_tokenizer(str(self.plan.vocab), self.plan.data.lower_case)

    def prepare(self, _: int) -> Iterator[tuple[str, int]]:
        """Decide which documents make which split; gives (split, number of a part) for every part."""
        plan = self.plan
        with self._failure_kept():
            store = TokenStore(store_folder(plan.data))
            for split in plan_splits(plan.data, self._tokenizer, store, plan.missing):
                prepared = split.prepare()
                _save(prepared, self.folder / prepared.name)
                yield from ((prepared.name, number) for number in range(len(prepared.parts)))

    def write_part(self, part: tuple[str, int]) -> tuple[str, int]:
        """Make the instances of a part; returns (split, 1)."""
        name, number = part
        with self._failure_kept():
            split = self._split(name)
            path, *rest = split.parts[number]
            if not path.with_suffix(".table").exists():
                write_part(split.job, path, *rest)
        return name, 1

    def list_shards(self, split: tuple[str, int]) -> Iterator[tuple[str, int]]:
        """(split, number of a shard) for every shard of a split whose parts are made."""
        name, count = split
        with self._failure_kept():
            _expect(len(self._split(name).parts), count)
        return ((name, shard) for shard in range(self._split(name).job.num_shards))

    def merge_shard(self, shard: tuple[str, int]) -> tuple[str, int]:
        """Write a shard and, to the folder of the plan, its index entry; return (split, 1)."""
        name, number = shard
        with self._failure_kept():
            split = self._split(name)
            entry = merge_shard(split.job, [part[0] for part in split.parts], number)
            _save(entry, self._entry(name, number))
        return name, 1

    def _entry(self, name: str, number: int) -> Location:
        return self.folder / f"{name}-{number:05d}"

    def finish(self, shards: tuple[str, int]) -> None:
        """Write a split's index and manifest and move its folder in place."""
        name, count = shards
        with self._failure_kept():
            split = self._split(name)
            if not (split.target / MANIFEST_NAME).is_file():
                _expect(split.job.num_shards, count)
                split.finish(pickle.loads(self._entry(name, number).read_bytes()) for number in range(count))
            _save(split.done(), self.folder / f"{name}-done")
