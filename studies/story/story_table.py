"""The tables and the picture of the finished runs of ``story.py``."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sys
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import TRAINED, Paired, cells, paired

Results = Mapping[str, Mapping[str, Any]]
SYSTEMS = (
    "nnlm", "cbow", "skip_gram", "glove", "awd_lstm", "elmo", "gpt", "bert", "modern", "drawn vectors",
    "drawn elmo", "drawn modern", "tfidf", "ceiling",
)  # fmt: skip
# Systems whose loss is a cross-entropy of pieces.
LANGUAGE_MODELS = ("nnlm", "awd_lstm", "elmo", "gpt", "bert", "modern")
STATIC, CONTEXTUAL = ("cbow", "skip_gram", "glove"), ("elmo", "gpt", "bert", "modern")
INSIGHT = ("pairs", "pos", "senses", "similarity")
_TASKS = ("clinc150-10", "clinc150", "snips-200", "snips", "sst2", "stsb")
COLUMNS = {
    "frozen": [f"task/results/{task}/frozen" for task in _TASKS if task != "stsb"],
    "tuned": [f"task/results/{task}/tuned" for task in _TASKS],
}
# The steps of the story: the later system and the earlier one.
STEPS = (
    ("skip_gram", "nnlm"), ("skip_gram", "glove"), ("elmo", "skip_gram"), ("gpt", "awd_lstm"), ("gpt", "elmo"),
    ("modern", "gpt"), ("modern", "elmo"), ("modern", "bert"), ("skip_gram", "drawn vectors"),
    ("elmo", "drawn elmo"), ("modern", "drawn modern"),
)  # fmt: skip


def scores(results: Results, column: str, budget: str, system: str, seeds: Sequence[int]) -> dict[int, float]:
    """Return the scores of the finished runs by seed. ``column``: the first part of the key of a line."""
    lines = {seed: results.get(f"{column}/{budget}/{system}/{seed}") for seed in seeds}
    return {seed: line["score"] for seed, line in lines.items() if line}


def cell(values: Sequence[float]) -> str:
    """Return the mean, and with several values half the width of its 95% interval."""
    return f"{paired(values)!s}".lstrip("+").replace("nan", "-") if values else "-"


def unigram(results: Results) -> float | None:
    """Return the loss of the unigram distribution of masked pieces on the scored documents."""
    lines = [line for key, line in results.items() if key.startswith("model/") and "/modern/" in key]
    return lines[0].get("unigram_cross_entropy") if lines else None


def is_trained(results: Results, budget: str, system: str, seeds: Sequence[int]) -> bool:
    """Return False if the mean loss of a language model is not 1 nat under that of the unigram distribution."""
    base, lines = unigram(results), _models(results, budget, system, seeds)
    if system not in LANGUAGE_MODELS or base is None or not lines:
        return True
    return base - statistics.mean(masked_loss(line) for line in lines) >= TRAINED


def masked_loss(line: Mapping[str, Any]) -> float:
    """Return the loss of pieces: without that of sentence pairs, which BERT's own loss includes."""
    return line.get("mlm_loss", line["loss"])


def _models(results: Results, budget: str, system: str, seeds: Sequence[int]) -> list[Mapping[str, Any]]:
    lines = (results.get(f"model/{budget}/{system}/{seed}") for seed in seeds)
    return [line for line in lines if line]


def _head(names: Sequence[str]) -> list[str]:
    return [cells(names), cells(["---"] * len(names))]


def learned(results: Results, budget: str, seeds: Sequence[int]) -> list[str]:
    """Return the table of what each system learned from the text."""
    lines = _head(["system", "seeds", "rate", "million tokens", "seconds of steps", "held-out loss", *INSIGHT])
    for system in SYSTEMS:
        runs = _models(results, budget, system, seeds)
        values = [cell(list(scores(results, column, budget, system, seeds).values())) for column in INSIGHT]
        if not runs and set(values) == {"-"}:
            continue
        row = ["-"] * 4
        if runs:
            losses = cell([masked_loss(run) for run in runs]) + "*" * (
                not is_trained(results, budget, system, seeds)
            )
            tokens = statistics.mean(run["tokens"] for run in runs)
            # Of a run that was continued, those of its last command; longer where others used its core.
            seconds = statistics.median(run["steps"] * run["step_seconds"] for run in runs)
            row = [f"{runs[0]['rate']:g}", f"{tokens / 1e6:.1f}", f"{seconds:.0f}", losses]
            if system.startswith("drawn"):
                row = ["-"] * 4
        count = max(len(runs), *(len(scores(results, column, budget, system, seeds)) for column in INSIGHT))
        lines.append(cells([system, count, *row, *values]))
    return lines


def tasks(results: Results, budget: str, way: str, seeds: Sequence[int]) -> list[str]:
    """Return the table of the tasks with the encoder frozen or tuned."""
    lines = _head([way, *(column.split("/")[2] for column in COLUMNS[way])])
    for system in SYSTEMS:
        values = [cell(list(scores(results, column, budget, system, seeds).values())) for column in COLUMNS[way]]
        if set(values) != {"-"}:
            lines.append(cells([system, *values]))
    return lines


def difference(results: Results, column: str, later: str, earlier: str, seeds: Sequence[int]) -> Paired | None:
    """Return the difference of two systems after equal seconds, paired over seeds."""
    a, b = (scores(results, column, "seconds", system, seeds) for system in (later, earlier))
    both = sorted(set(a) & set(b))
    return paired([a[seed] - b[seed] for seed in both]) if both else None


def steps(results: Results, seeds: Sequence[int]) -> list[str]:
    """Return the table of the differences that each step made."""
    few = [f"task/results/{task}/{way}" for way in COLUMNS for task in ("clinc150-10", "snips-200", "sst2")]
    chosen = [*INSIGHT, *few]
    lines = _head(["step", *(" ".join(column.split("/")[2:]) or column for column in chosen)])
    for later, earlier in STEPS:
        values = [difference(results, column, later, earlier, seeds) for column in chosen]
        if any(values):
            lines.append(cells([f"{later} - {earlier}", *("-" if one is None else one for one in values)]))
    return lines


def layers(results: Results, budget: str, seeds: Sequence[int]) -> list[str]:
    """Return the table of parts of speech and senses by layer, from the embeddings."""
    lines = _head(["system", "parts of speech by layer", "senses by layer"])
    for system in SYSTEMS:
        row = []
        for column in ("pos", "senses"):
            runs = [results.get(f"{column}/{budget}/{system}/{seed}") for seed in seeds]
            by_layer = zip(*(run["layers"] for run in runs if run), strict=True)
            row.append(", ".join(cell(list(values)) for values in by_layer))
        if any(row):
            lines.append(cells([system, *(one or "-" for one in row)]))
    return lines


def tables(results: Results, seeds: Sequence[int]) -> list[str]:
    """Return the lines of all tables; cells are means, and with several seeds 95% intervals."""
    base = unigram(results)
    lines = (
        [] if base is None else [f"unigram distribution of masked pieces: {base:.3f} nats; *: not 1 nat under it"]
    )
    for budget in ("seconds", "tokens"):
        lines += ["", f"equal {budget}: what each system learned", "", *learned(results, budget, seeds)]
        for way in COLUMNS:
            lines += ["", f"equal {budget}: tasks, {way}", "", *tasks(results, budget, way, seeds)]
        lines += ["", f"equal {budget}: layers", "", *layers(results, budget, seeds)]
    return [*lines, "", "differences after equal seconds, paired over seeds", "", *steps(results, seeds)]


def problems(results: Results, systems: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return what is missing or below the bar: each contextual system that counts as trained must tell the senses
    of nouns apart better than every static one, by two standard errors of the difference paired over seeds."""
    below = []
    wanted = [f"{column}/seconds/{system}/{seed}" for system in systems for seed in seeds
              for column in ("senses", *COLUMNS["frozen"], *COLUMNS["tuned"])]  # fmt: skip
    if missing := [key for key in wanted if key not in results]:
        below.append(f"{len(missing)} of {len(wanted)} results are missing, first {missing[0]}")
    for later in (system for system in CONTEXTUAL if system in systems):
        for earlier in (system for system in STATIC if system in systems):
            step = difference(results, "senses", later, earlier, seeds)
            if step is None or not is_trained(results, "seconds", later, seeds):
                continue
            if not step.mean > 2 * step.error:
                below.append(f"senses: {later} - {earlier} {step.mean:+.3f}, standard error {step.error:.3f}")
    return below


def picture(results: Results, seeds: Sequence[int], path: Path) -> None:
    """Draw what each system is worth after equal seconds: a panel for each of six columns."""
    from matplotlib.figure import Figure

    shown = {
        "minimal pairs": "pairs", "senses (macro F1)": "senses", "parts of speech": "pos",
        "CLINC150, 10 a class, frozen": "task/results/clinc150-10/frozen",
        "SNIPS slots, 200 texts, frozen": "task/results/snips-200/frozen",
        "SNIPS slots, 200 texts, tuned": "task/results/snips-200/tuned",
    }  # fmt: skip
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, (title, column) in zip(figure.subplots(2, 3).flat, shown.items(), strict=True):
        values = {system: scores(results, column, "seconds", system, seeds) for system in SYSTEMS}
        values = {system: own for system, own in values.items() if own}
        if values:
            means = [statistics.mean(own.values()) for own in values.values()]
            halves = [paired(list(own.values())).half if len(own) > 1 else 0.0 for own in values.values()]
            colors = ["0.75" if system.startswith("drawn") else "tab:blue" for system in values]
            axes.barh(list(values), means, xerr=halves, color=colors)
            axes.invert_yaxis()
            axes.set_xlim(left=max(0.0, min(means) - 0.1))
        axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
