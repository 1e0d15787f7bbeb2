"""The report of ``bert-data clean`` as JSON and Markdown, and the names of the text files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, TypedDict

from bert_jax.json_values import Json
from data_pipeline.contrib.clean.drop_counts import EXAMPLES, RULES
from data_pipeline.contrib.clean.options import chance, settings_of
from data_pipeline.contrib.clean.workspace import Plan
from data_pipeline.text.compressed import COMPRESSIONS
from data_pipeline.text.corpus import CLEANED_NAME
from data_pipeline.text.documents import TEXT_SUFFIXES, Source

REPORT_NAME = "cleaned.md"
_SIMILARITIES = tuple(tenth / 10 for tenth in range(1, 11))
_COUNTS: tuple[Literal["documents_in", "documents_out", "characters_in", "characters_out"], ...]
_COUNTS = ("documents_in", "documents_out", "characters_in", "characters_out")


class SourceCounts(TypedDict):
    """Counts of a source."""

    name: str
    file: str
    documents_in: int
    documents_out: int
    characters_in: int
    characters_out: int


class Candidates(TypedDict):
    """The banding of MinHash, and the probability with which it compares a pair of a similarity."""

    bands: int
    rows: int
    probability_by_similarity: dict[str, float]


class CleanReport(TypedDict):
    """Content of the report."""

    settings: dict[str, Any]
    candidates: Candidates
    documents_in: int
    documents_out: int
    characters_in: int
    characters_out: int
    rules: dict[str, dict[str, Any]]
    sources: list[SourceCounts]


def output_names(sources: Sequence[Source]) -> list[str]:
    """Return the relative path of the output of each source: its name with the suffix .txt, without compression.

    Characters other than letters, digits and ``-_.`` become ``_``, as does a point at the start of a name, because
    hidden files are not read as text. A path that occurs twice gets a number.
    """
    names: list[str] = []
    taken = {CLEANED_NAME, REPORT_NAME}
    for source in sources:
        parts = [re.sub(r"^\.|[^\w.-]", "_", part) for part in source.name.split("/") if part]
        path = PurePosixPath(*parts)
        path = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
        stem = str(path.with_suffix("") if path.suffix.lower() in TEXT_SUFFIXES else path)
        name, number = f"{stem}.txt", 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}.txt"
        taken.add(name)
        names.append(name)
    return names


def make_report(
    plan: Plan, counts: dict[str, dict[str, int]], examples: Mapping[str, list[dict[str, Any]]]
) -> CleanReport:
    """Return the report: settings, counts per source, and per rule the counts and examples."""
    settings = settings_of(plan.options, plan.corpus)
    names = output_names(plan.sources)
    sources: list[SourceCounts] = []
    for index, (source, name) in enumerate(zip(plan.sources, names, strict=True)):
        own = counts[str(index)]
        row = SourceCounts(
            name=source.name, file=name if own["documents_out"] else "",
            documents_in=own.get("documents_in", 0), characters_in=own.get("characters_in", 0),
            documents_out=own["documents_out"], characters_out=own["characters_out"],
        )  # fmt: skip
        sources.append(row)
    rules = {}
    for rule in RULES:
        shown = [{name: value for name, value in one.items() if name != "place"} for one in examples.get(rule, [])]
        rules[rule] = {"documents": 0, "lines": 0, "characters": 0, **counts.get(rule, {}), "examples": shown}
    bands, rows = plan.options.clean.banding
    chances = {str(similarity): round(chance(similarity, bands, rows), 4) for similarity in _SIMILARITIES}
    return {
        "settings": settings,
        "candidates": {"bands": bands, "rows": rows, "probability_by_similarity": chances},
        "documents_in": sum(source["documents_in"] for source in sources),
        "documents_out": sum(source["documents_out"] for source in sources),
        "characters_in": sum(source["characters_in"] for source in sources),
        "characters_out": sum(source["characters_out"] for source in sources),
        "rules": rules,
        "sources": sources,
    }


def is_on(rule: str, settings: Mapping[str, Json]) -> bool:
    """Return True if ``rule`` is applied with these ``settings``."""
    return {
        "encoding": settings["clean.encoding"] != "off",
        "length": bool(settings["clean.least_words"] or settings["clean.most_words"]),
        "language": bool(settings["clean.languages"]),
        "exact_duplicate": bool(settings["clean.exact_duplicates"]),
        "boilerplate": bool(settings["clean.boilerplate"]),
        "near_duplicate": bool(settings["clean.near_duplicates"]),
    }[rule]


def summary(report: CleanReport) -> Iterator[str]:
    """Yield a line for each rule that is on, and a line of totals."""
    for rule in RULES:
        if is_on(rule, report["settings"]):
            own = report["rules"][rule]
            lines = f", {own['lines']:,} lines" if own["lines"] else ""
            yield f"{rule}: {own['documents']:,} documents{lines}, {own['characters']:,} characters dropped"
    yield (
        f"{report['documents_out']:,} of {report['documents_in']:,} documents and {report['characters_out']:,} of "
        f"{report['characters_in']:,} characters remain"
    )


def as_text(report: CleanReport) -> str:
    """Return the report as a Markdown page."""
    lines = [
        "# Cleaned text", "",
        f"{report['documents_out']:,} of {report['documents_in']:,} documents remain, "
        f"{report['characters_out']:,} of {report['characters_in']:,} characters.", "",
        *_rule_lines(report), "",
        "| source | documents in | out | characters in | out | file |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for source in report["sources"]:
        numbers = " | ".join(f"{source[name]:,}" for name in _COUNTS)
        lines.append(f"| {source['name']} | {numbers} | {source['file'] or 'none'} |")
    for rule in RULES:
        if held := report["rules"][rule]["examples"]:
            lines += ["", f"## {rule}: {len(held)} examples (at most {EXAMPLES})", ""]
            lines += [_example_line(one) for one in held]
    lines += ["", "## Settings", "", *(f"* {name}: {value}" for name, value in report["settings"].items()), ""]
    return "\n".join(lines)


def _rule_lines(report: CleanReport) -> Iterator[str]:
    """Yield a table of the rules, and further figures of two of them."""
    settings, candidates = report["settings"], report["candidates"]
    yield from ("| rule | documents dropped | lines dropped | characters dropped |", "|---|---|---|---|")
    for rule, meaning in RULES.items():
        own = report["rules"][rule]
        state = "" if is_on(rule, settings) else " (off)"
        yield f"| {rule}: {meaning}{state} | {own['documents']:,} | {own['lines']:,} | {own['characters']:,} |"
    if is_on("encoding", settings):
        own = report["rules"]["encoding"]
        yield ""
        yield (
            f"Encoding: {own.get('lines_repaired', 0):,} lines repaired, "
            f"{own.get('control_characters_removed', 0):,} control characters removed."
        )
    if is_on("near_duplicate", settings):
        chances = candidates["probability_by_similarity"].items()
        yield ""
        yield (
            f"Near duplicates: similarity {settings['clean.near_duplicates']} or more; MinHash with "
            f"{candidates['bands']} bands of {candidates['rows']} rows. Probability that a pair is compared, by "
            f"similarity: {', '.join(f'{similarity}: {value:.4f}' for similarity, value in chances)}."
        )


def _example_line(fields: Mapping[str, Any]) -> str:
    """Return an example as one line that ends with the text."""
    shown = []
    for name, value in fields.items():
        if name in ("source", "document", "text"):
            continue
        if isinstance(value, dict):
            other = f" ({value['text']!r})" if "text" in value else ""
            shown.append(f"{name} {value['source']} document {value['document']}{other}")
        else:
            shown.append(f"{name} {value!r}")
    return f"* {fields['source']} document {fields['document']}: {', '.join(shown)}: {fields['text']!r}"
