"""Build shards of very large corpora with Apache Beam: one pipeline runs the jobs of the process pool.

    files of text -> tokenized chunks -> token store -> parts -> shards -> index and manifest

The steps exchange only names, indices and counts. The data is stored in files on a shared file system or in an
object store, under names that are the same on the workers and on the machine that starts the pipeline. The runner
therefore moves no data, and lost results are detected. A pipeline that is run again keeps finished chunks, parts
and shards.
"""

import contextlib
import dataclasses
import io
import logging
import os
import pickle
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, TextIO

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.shard_jobs import choose_packing, merge_shard, write_part
from data_pipeline.build.shard_split import plan_splits, prepare_split
from data_pipeline.build.text_facts import text_lines
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
from data_pipeline.text.corpus import Listing
from data_pipeline.text.documents import Reading, Source

_SHARE_BYTES = 4 << 20  # a job tokenizes at least this much of a larger source
_MOST_SHARES = 8  # largest number of jobs that tokenize one source


def build_with_beam(
    data: DataConfig, vocab: Location, tokenizer: Tokenizer, listing: Listing, missing: Sequence[str],
    options: Sequence[str], report: Callable[[str], None],
) -> None:  # fmt: skip
    """Build the ``missing`` splits, and the token store if it does not exist.

    The caller must hold the locks on the folders of the splits and of the store. ``options`` are arguments for
    Beam; without ``--runner``, the embedded runner uses ``data.workers`` threads. An exception of a job is
    re-raised. Raises ``ValueError`` (one line) if the pipeline fails for another reason.
    """
    chosen = check_options(data.workers, options)
    data = dataclasses.replace(
        data, shards=_absolute(data.shards), eval_shards=_absolute(data.eval_shards),
        token_store=_absolute(data.token_store),
    )  # fmt: skip
    sources = [dataclasses.replace(source, path=source.path.absolute()) for source in listing.sources]
    jobs = _Jobs(location(data.shards) / f".build-beam-{uuid.uuid4().hex[:8]}")
    jobs.folder.mkdir(parents=True)
    settings = store_settings(data, tokenizer, sources)
    has_store = (store_folder(data) / META_NAME).is_file()
    chunks = None if has_store else chunk_folder(store_folder(data), settings, "each source")
    write_whole(jobs.folder / vocab.name, vocab.read_bytes())
    plan = _Plan(
        data, jobs.folder / vocab.name, tuple(sources), tuple(missing), settings, chunks, listing.summary()
    )
    _save(plan, jobs.folder / "plan")
    size = sum(source.path.stat().st_size for source in sources)
    report(
        f"building shards from {size / 1e6:,.1f} MB of text under Apache Beam "
        f"(runner: {chosen.get_all_options()['runner']})"
    )
    run_pipeline(jobs, options, chosen, partial(_add_steps, jobs=jobs, has_store=has_store))
    if not has_store:
        for line in text_lines(TokenStore(store_folder(data)).meta["text"]):
            report(line)
    for name in missing:
        for line in _load(jobs.folder / f"{name}-done"):
            report(line)


def run_pipeline(
    jobs: "Jobs", options: Sequence[str], chosen: Any, add_steps: Callable[[ModuleType, Any], None]
) -> None:
    """Run the pipeline to which ``add_steps(beam, pipeline)`` adds the steps of ``jobs``.

    ``chosen`` is the result of :func:`check_options` for ``options``. An exception of a job is re-raised. Raises
    ``ValueError`` (one line) if the pipeline fails for another reason.
    """
    beam = load_beam()
    output = _WithoutTracebacks(sys.stderr)
    try:
        with contextlib.ExitStack() as stack:
            if _is_embedded(options):
                stack.enter_context(contextlib.redirect_stderr(output))  # type: ignore[type-var]
            add_steps(beam, stack.enter_context(beam.Pipeline(options=chosen)))
    except Exception as error:
        for failure in jobs.folder.glob("failure-*"):
            raise _load(failure) from None
        sys.stderr.write(output.held)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"the Beam pipeline failed: {lines[-1]}; finished parts are kept; run the same command again"
        ) from None


def load_beam() -> ModuleType:
    """Import Apache Beam with its log messages disabled. Raises ``ValueError`` if it is not installed."""
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


def check_options(workers: int, options: Sequence[str]) -> Any:
    """Parse the options of Beam; without ``--runner``, select the embedded runner with ``workers`` threads (0: one
    per processor).

    Raises ``ValueError`` for an invalid value and, with the embedded runner, for an unknown option; other runners
    define further options.
    """
    load_beam()
    workers = workers or processor_count() if _is_embedded(options) else 0
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
        raise ValueError(f"command line, after --: {unknown[0]} is not an option of Apache Beam; remove it")
    return chosen


def _absolute(name: str) -> str:
    return name and str(location(name).absolute())


class _WithoutTracebacks:
    """Wrapper of standard error that omits the tracebacks of Beam's embedded workers.

    The errors of these workers are reported in one line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.held, self._holds = "", False

    def write(self, text: str) -> None:
        is_end = text == "\n" and self._holds  # print writes the line end separately
        self._holds = text.startswith("Traceback (")
        if self._holds:
            self.held = text
        elif not is_end:
            self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def _add_steps(beam: ModuleType, pipeline: Any, *, jobs: "_Jobs", has_store: bool) -> None:
    """Add the steps of the build to ``pipeline``.

    ``Reshuffle`` distributes the next step over all workers; ``ToList`` and ``CombinePerKey`` wait for all results.
    """

    def step(name: str) -> partial[Any]:
        return partial(jobs.run, name)

    if has_store:
        store = pipeline | "start" >> beam.Create([0])
    else:
        store = (
            pipeline
            | "text" >> beam.Create(range(len(jobs.plan.shares)))
            | "spread text" >> beam.Reshuffle()
            | "tokenize" >> beam.Map(step("tokenize"))
            | "all chunks" >> beam.combiners.ToList()
            | "store" >> beam.Map(step("merge_chunks"))
        )
    (
        store
        | "splits" >> beam.FlatMap(step("prepare"))
        | "spread parts" >> beam.Reshuffle()
        | "part" >> beam.Map(step("write_part"))
        | "all parts" >> beam.CombinePerKey(sum)
        | "shards" >> beam.FlatMap(step("list_shards"))
        | "spread shards" >> beam.Reshuffle()
        | "shard" >> beam.Map(step("merge_shard"))
        | "all shards" >> beam.CombinePerKey(sum)
        | "finish" >> beam.Map(step("finish"))
    )


# ------------------------------------------------------------------ shared by the jobs


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Inputs of a pipeline. They are stored in a file, because the serialized pipeline must stay small."""

    data: DataConfig
    vocab: Location
    sources: tuple[Source, ...]
    missing: tuple[str, ...]
    settings: dict[str, Any]  # of the token store
    chunks: Location | None  # folder of tokenized text; None: the store exists
    files: str  # which files were read and skipped

    @property
    def shares(self) -> list[tuple[int, int, int]]:
        """Shares of the text, one per job: (source, k, n) denotes the chunks k, k + n, k + 2n, ... of a source.

        Each of the n jobs of a source reads the whole source, so n is small: to use many workers, a corpus should
        consist of many files.
        """
        sizes = (size for _, size in self.settings["data.corpus"])
        counts = [min(max(1, size // _SHARE_BYTES), _MOST_SHARES) for size in sizes]
        return [(source, k, n) for source, n in enumerate(counts) for k in range(n)]


def _save(value: Any, path: Location) -> None:
    write_whole(path, pickle.dumps(value))


@lru_cache(maxsize=16)
def _load(path: Location) -> Any:
    """Load and cache a value that ``_save`` stored; files in the folder of a pipeline never change."""
    return pickle.loads(path.read_bytes())


def _chunk_name(source: int, piece: int) -> str:
    return f"{source:06d}-{piece:06d}.npz"


def expect(wanted: int, found: int) -> None:
    """Raise ``ValueError`` if the runner lost or repeated a result."""
    if found != wanted:
        raise ValueError(
            f"Beam returned only {found} of {wanted} results; finished parts are kept; run the same command again"
        )


class Jobs:
    """The steps of a pipeline, which are methods. A runner may run a step on any machine, and more than once."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder

    def run(self, step: str, value: Any) -> Any:
        """Run the method named ``step``; store an exception in a file, because runners report only its text."""
        try:
            return getattr(self, step)(value)
        except (ValueError, OSError) as error:
            _save(error, self.folder / f"failure-{uuid.uuid4().hex[:8]}")
            raise


class _Jobs(Jobs):
    """The steps of a build."""

    @property
    def plan(self) -> _Plan:
        return _load(self.folder / "plan")

    @property
    def _tokenizer(self) -> Tokenizer:
        return cached_tokenizer(str(self.plan.vocab), self.plan.data)

    def tokenize(self, number: int) -> tuple[int, int]:
        """Tokenize the share with the index ``number``; return (``number``, number of chunks of its source)."""
        plan = self.plan
        data, (source, first, step) = plan.data, plan.shares[number]
        assert plan.chunks is not None
        pieces, readings = 0, list[Reading]()
        for piece, documents in enumerate(cut_documents([plan.sources[source]], data, readings, plan.sources)):
            pieces += 1
            path = plan.chunks / _chunk_name(source, piece)
            if piece % step == first and not path.exists():
                tokenize_chunk(path, documents, str(plan.vocab), data)
        if first == 0:
            _save(readings[0], self.folder / f"reading-{source:06d}")
        return number, pieces

    def merge_chunks(self, done: list[tuple[int, int]]) -> int:
        """Merge all chunks into the token store."""
        plan, pieces = self.plan, dict(done)
        assert plan.chunks is not None
        folder = store_folder(plan.data)
        if not (folder / META_NAME).is_file():
            expect(len(plan.shares), len(pieces))
            counts = {source: pieces[i] for i, (source, _, _) in enumerate(plan.shares)}
            names = [_chunk_name(source, piece) for source, n in counts.items() for piece in range(n)]
            readings = [_load(self.folder / f"reading-{source:06d}") for source in range(len(plan.sources))]
            paths = [plan.chunks / name for name in names]
            merge_chunks(folder, paths, plan.settings, self._tokenizer, plan.files, readings)
        remove_chunks(folder)
        return 0

    def prepare(self, _: int) -> list[tuple[str, int]]:
        """Assign the documents to the splits; return (split, index of the part) for every part."""
        data, store = self.plan.data, TokenStore(store_folder(self.plan.data))
        planned = plan_splits(data, store, self.plan.missing)
        prepared = [prepare_split(data, self._tokenizer, store, *split) for split in planned]
        for split in prepared:
            _save(split, self.folder / split.name)
        return [(split.name, number) for split in prepared for number in range(len(split.parts))]

    def write_part(self, part: tuple[str, int]) -> tuple[str, int]:
        """Write the instances of a part; return (split, 1), to be summed per split."""
        name, number = part
        split = _load(self.folder / name)
        path, *rest = split.parts[number]
        if not path.with_suffix(".table").exists():
            write_part(split.job, path, *rest)
        return name, 1

    def list_shards(self, parts: tuple[str, int]) -> list[tuple[str, int]]:
        """Check that all parts of a split are finished; return (split, index of the shard) for every shard."""
        name, count = parts
        split = _load(self.folder / name)
        expect(len(split.parts), count)
        split.check()
        if split.job.is_packed:
            choose_packing(split.job, [part[0] for part in split.parts])
        return [(name, shard) for shard in range(split.job.num_shards)]

    def merge_shard(self, shard: tuple[str, int]) -> tuple[str, int]:
        """Write a shard, and write its index entry to the folder of the pipeline; return (split, 1)."""
        name, number = shard
        split = _load(self.folder / name)
        entry = merge_shard(split.job, [part[0] for part in split.parts], number)
        _save(entry, self.folder / f"{name}-{number:05d}")
        return name, 1

    def finish(self, shards: tuple[str, int]) -> None:
        """Write the index and the manifest of a split, and move the folder of the split to its final path."""
        name, count = shards
        split = _load(self.folder / name)
        if not (split.target / MANIFEST_NAME).is_file():
            expect(split.job.num_shards, count)
            entries = (self.folder / f"{name}-{number:05d}" for number in range(count))
            split.finish(pickle.loads(entry.read_bytes()) for entry in entries)
        _save(split.done(self._tokenizer), self.folder / f"{name}-done")
