"""``bert-data clean`` removes duplicates, boilerplate and broken text, with processes or Apache Beam.

    sources -> chunks, rules on documents -> exact duplicates -> repeated lines -> signatures -> candidates
    -> comparison -> files of text, report

A run works in ``OUTPUT/.clean-FINGERPRINT``; the fingerprint covers the settings and the corpus, so a run that is
started again after it was killed keeps finished jobs. The results of a job depend only on its input files, never on
the number of workers. The report is written last and marks a finished folder.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax import registry
from bert_jax.io.files import remove_tree
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.json_values import Json
from data_pipeline.build.identity import HASHES_NAME, file_settings
from data_pipeline.build.text_facts import cut_lines_note
from data_pipeline.build.workers import Workers, exclusive, processor_count, remove_scratch
from data_pipeline.contrib.clean.job_table import STAGES
from data_pipeline.contrib.clean.options import CleanOptions, settings_of
from data_pipeline.contrib.clean.output import finish
from data_pipeline.contrib.clean.report import CleanReport, summary
from data_pipeline.contrib.clean.rules import check_languages, load_ftfy
from data_pipeline.contrib.clean.scanning import cut_source, find_exact, scan_chunk
from data_pipeline.contrib.clean.workspace import Plan, save_plan
from data_pipeline.text.corpus import CLEANED_NAME, list_corpus
from data_pipeline.text.documents import Reading

Report = Callable[[str], None]


def clean(
    options: CleanOptions, target: Location, report: Report, beam_options: Sequence[str] | None = None
) -> CleanReport:
    """Clean the corpus of ``options`` and write text and report to the folder ``target``; return the report.

    With ``beam_options``, the jobs run under Apache Beam. If ``target`` has been written with the same settings,
    nothing is done. Raises ``ValueError`` (one line) if it contains anything else, or if a library is missing.
    """
    check_languages(options.clean.languages)
    if options.clean.encoding != "off":
        load_ftfy()
    data = options.data
    listing = list_corpus(
        data.corpus, split=data.dataset_split, tfds_data_dir=data.tfds_data_dir, json_field=data.json_field,
        encoding=data.encoding,
    )  # fmt: skip
    sources = list(listing.sources)
    report(listing.summary())
    _check_apart(options.data.corpus, target)
    files = [(source.name, source.path) for source in sources]
    with exclusive(target):
        if done := _finished(target, options, files):
            _remove_work(target)  # a kill after the report leaves it
            report(f"{target}: already cleaned with these settings")
            return done
        corpus = file_settings("data.corpus", files, target)
        folder = target / f".clean-{_fingerprint(settings_of(options, corpus))}"
        _check_empty(target, folder)
        absolute = (dataclasses.replace(source, path=source.path.absolute()) for source in sources)
        plan = Plan(folder.absolute(), options, tuple(absolute), corpus)
        save_plan(plan)
        size = sum(source.path.stat().st_size for source in sources)
        if beam_options is None:
            with Workers(options.data.workers or processor_count()) as workers:
                report(f"cleaning {size / 1e6:,.1f} MB in {workers.count} processes")
                _run(plan, workers, report)
        else:
            registry.load("data_extensions", "--runner beam")  # raises without this room
            from data_pipeline.contrib.clean.beam import clean_with_beam

            report(f"cleaning {size / 1e6:,.1f} MB under Apache Beam")
            clean_with_beam(plan, beam_options)
        result = finish(plan, target)
        remove_tree(folder)
    for line in summary(result):
        report(line)
    return result


def _fingerprint(settings: dict[str, Json]) -> str:
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _check_apart(corpus: Sequence[str], target: Location) -> None:
    """Raise ``ValueError`` if ``target`` is in a folder of the corpus, which would then contain the result."""
    for entry in corpus:
        path = location(entry)
        if type(path) is type(target) and target.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"--output: {target} is in the corpus {entry}; name a folder outside of it")


def _finished(target: Location, options: CleanOptions, files: Sequence[tuple[str, Location]]) -> CleanReport | None:
    """Return the report in ``target`` if it was written for these ``files`` and options; None if there is no
    report."""
    path = target / CLEANED_NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        recorded = found["settings"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: the report is damaged; name another folder, or delete this one") from None
    corpus = file_settings("data.corpus", files, target, recorded)
    wanted = json.loads(json.dumps(settings_of(options, corpus)))
    usual = {"data.encoding": "auto"}
    recorded, wanted = usual | recorded, usual | wanted
    if changed := [name for name in wanted if recorded.get(name) != wanted[name]]:
        raise ValueError(
            f"{target}: contains text cleaned with other settings ({', '.join(changed)}); name another folder, or "
            "delete this one"
        )
    return found


def _check_empty(target: Location, folder: Location) -> None:
    """Remove unfinished runs with other settings from ``target``; raise ``ValueError`` if it contains text."""
    for path in _remove_work(target, keep=folder.name):
        if path.name not in (".lock", HASHES_NAME, folder.name) and not (folder / "plan").is_file():
            raise ValueError(f"{target}: the folder is not empty ({path.name}); name a new folder")


def _remove_work(target: Location, keep: str = "") -> list[Location]:
    """Remove the folders of runs from ``target``, except ``keep``; return what else it contains."""
    held: list[Location] = []
    if not isinstance(target, ObjectPath) or target.is_dir():
        held += target.iterdir()
    left = [path for path in held if path.name == keep or not path.name.startswith(".clean-")]
    for path in {*held} - {*left}:
        remove_tree(path)
    return left


def _run(plan: Plan, workers: Workers, report: Report) -> None:
    """Run all jobs in ``workers``."""
    folder = plan.folder
    for room in folder.iterdir():
        if room.is_dir():
            remove_scratch(room)
    names: list[str] = []
    readings: list[Reading] = []

    def jobs() -> Iterator[tuple[Any, ...]]:
        for index in range(len(plan.sources)):
            for name, first, documents in cut_source(plan, index, readings):
                names.append(name)
                yield folder, name, first, documents

    characters = 0
    for done in workers.run(scan_chunk, jobs()):
        if (characters + done) >> 26 > characters >> 26:
            report(f"scanned {(characters + done) / 1e6:,.0f} million characters")
        characters += done
    if places := [place for one in readings for place in one.cut_lines]:
        report(cut_lines_note(places))
    find_exact(folder, names)
    for stage in STAGES:
        for _ in workers.run(stage.job, ((folder, item) for item in stage.items(folder))):
            pass
