"""Parts of a report about a fine-tuned model: scores, classes and tags, confusion matrices, mistakes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.objectives.display import Confusion, Findings, Mistake
from bert_jax.training.logging.charts import bar_chart, point_chart
from bert_jax.training.logging.curves import different_scores
from bert_jax.training.logging.page import (
    card,
    escape,
    format_value,
    isolated,
    pair,
    section,
    short,
    table,
    track,
    words_of,
)
from bert_jax.training.logging.run_files import RunFiles

# Number of scores of a split that are shown, of tiles among them, and of classes or tags.
_MOST_SCORES, _TILES, _MOST_CLASSES = 6, 2, 40
# Number of classes up to which a confusion matrix is shown, and otherwise of the most frequent confusions.
MOST_CELLS, _MOST_CONFUSIONS = 20, 15
_LONGEST_NAME = 24

Scores = Mapping[str, float | None]


def task_tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return tiles of the first scores of the first split, with what they are compared with."""
    if not run.is_finetuning or not (scores := run.scores()):
        return []
    split, values = next(iter(scores.items()))
    answer, start = run.plain_answers().get(split), run.start_scores(split)
    entries = []
    for name in _first(run, split, values)[:_TILES]:
        remark = ""
        if answer and answer["metric"] == name and answer["value"] is not None:
            remark = f"{format_value(name, answer['value'])} {answer['answer']}"
        elif start.get(name) is not None:
            remark = f"{format_value(name, start[name])} before training"
        entries.append((format_value(name, values[name]), f"{split}: {words_of(name)}", remark))
    return entries


def task_sections(run: RunFiles) -> list[str]:
    """Return the sections about a fine-tuned model: scores and confusion matrices, charts, mistakes."""
    matrices = dict(run.data.get("confusion") or {})
    matrices |= {one["split"]: one["confusion_matrix"] for one in run.results if "confusion_matrix" in one}
    scores, findings = run.scores() if run.is_finetuning else {}, run.data.get("findings") or {}
    cards = []
    for split in dict.fromkeys([*scores, *matrices, *findings]):
        values = scores.get(split, {})
        names = [name for name in _first(run, split, values) if "/" not in name]
        if names:
            cards.append(card(_score_table(run, split, values, names[:_MOST_SCORES]), heading=_heading(run, split)))
        if split in matrices:
            cards.append(card(_confusion(matrices[split]), heading=f"{split}: confusion matrix"))
        if classes := _classes(values):
            cards.append(card(classes, heading=f"{split}: by class or tag"))
    mistakes = [
        card(_mistakes(one), heading=f"{split}: {_share(one)}")
        for split, one in findings.items()
        if one.get("mistakes")
    ]
    heading = "Scores" if run.state == "complete" else "Scores of the last evaluation"
    return [
        section(heading, pair(*cards)),
        section("Most wrong examples", "".join(mistakes)),
    ]


def task_charts(run: RunFiles) -> list[str]:
    """Return the boxes of the charts about predictions: counts and pairs of values."""
    found = (run.data.get("findings") or {}).items()
    return [card(body, heading=f"{split}: {title}") for split, one in found for title, body in _charts(one)]


def _first(run: RunFiles, split: str, values: Scores) -> list[str]:
    """Return the names of the scores, beginning with the one that selects the parameters."""
    chosen = [one["chosen_by"]["metric"] for one in run.results if one["split"] == split and "chosen_by" in one]
    first = [*chosen, run.option("task.metric")]
    return sorted(different_scores(values), key=lambda name: name not in first)


def _heading(run: RunFiles, split: str) -> str:
    entry = next((one for one in run.results if one["split"] == split), {})
    parts = [f"{entry['n']:,} records"] if "n" in entry else []
    parts += [f"parameters of step {entry['step']:,}"] if "step" in entry else []
    return f"{split}: {', '.join(parts)}" if parts else split


def _score_table(run: RunFiles, split: str, values: Scores, names: Sequence[str]) -> str:
    answer, start = run.plain_answers().get(split), run.start_scores(split)
    if start and answer and answer["answer"] == "before training":
        answer = None
    intervals: Mapping[str, Any] = next((one["metrics"] for one in run.results if one["split"] == split), {})
    header = ["", "score", ""]
    header += [isolated(short(answer["answer"]))] if answer else []
    header += ["before training"] if start else []
    rows = []
    for name in names:
        value = values[name]
        known = {"before training": start.get(name)} if start else {}
        if answer and answer["metric"] == name:
            known[answer["answer"]] = answer["value"]
        is_share = value is not None and 0 <= value <= 1 and not name.endswith(("loss", "mse", "mae"))
        marks = [(x, text) for text, x in known.items() if x is not None]
        interval = intervals.get(name, {}).get("ci95")
        row = [escape(words_of(name)), f"<b>{escape(format_value(name, value))}</b>"]
        if interval:
            row[1] += f"<small>{' to '.join(escape(format_value(name, x)) for x in interval)}</small>"
        row.append(track(value or 0.0, marks) if is_share else "")
        if answer:
            row.append(escape(format_value(name, answer["value"])) if answer["metric"] == name else "")
        if start:
            row.append(escape(format_value(name, start.get(name))))
        rows.append(row)
    notes = "Small: the 95% interval. " if any(one.get("ci95") for one in intervals.values()) else ""
    if any("<u " in row[2] for row in rows):
        compared = [answer["answer"]] if answer else []
        compared += ["before training"] if start else []
        notes += f"The line in a bar: {isolated(' or '.join(compared))}."
    return table(header, rows, numbers=(1, *range(3, len(header))), css="whole") + f'<p class="soft">{notes}</p>'


def _classes(values: Scores) -> str:
    """Return a table of the scores NAME/CLASS, with a bar of the first of them."""
    found: dict[str, dict[str, float | None]] = {}
    for name, value in values.items():
        metric, slash, group = name.partition("/")
        if slash:
            found.setdefault(group, {})[metric] = value
    metrics = list(dict.fromkeys(metric for row in found.values() for metric in row))
    metrics.sort(key=lambda metric: metric not in ("f1", "slot_f1"))
    rows = []
    for group, row in [*found.items()][:_MOST_CLASSES]:
        first = row.get(metrics[0])
        bar = track(first) if first is not None and 0 <= first <= 1 else ""
        rows.append([isolated(group), bar, *(escape(format_value(one, row.get(one))) for one in metrics)])
    left = len(found) - len(rows)
    note = f'<p class="soft">{left:,} more are in metrics.json</p>' if left > 0 else ""
    header = ["", "", *(escape(words_of(metric)) for metric in metrics)]
    return table(header, rows, numbers=range(2, len(header)), css="whole") + note if rows else ""


def _confusion(matrix: Confusion) -> str:
    """Return the counts as a table whose cells are colored by their share of the row; of many classes, the most
    frequent confusions."""
    names, counts = [str(name) for name in matrix["labels"]], np.array(matrix["counts"])
    if not names:
        return ""
    right = int(np.trace(counts))
    note = f'<p class="soft">Rows: correct class. Columns: prediction. {right:,} of {counts.sum():,} right.</p>'
    if len(names) > MOST_CELLS:
        wrong = counts - np.diag(np.diag(counts))
        order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_MOST_CONFUSIONS]
        pairs = [divmod(int(one), len(names)) for one in order if wrong.flat[one]]
        rows = [
            [
                isolated(short(names[a], _LONGEST_NAME)),
                isolated(short(names[b], _LONGEST_NAME)),
                f"{wrong[a, b]:,}",
                f"{counts[a].sum():,}",
            ]
            for a, b in pairs
        ]
        return f'<p class="soft">{right:,} of {counts.sum():,} right. The most frequent confusions:</p>' + table(
            ["correct", "predicted", "records", "of"], rows, numbers=(2, 3)
        )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    turn = ' class="turn"' if sum(len(short(name, _LONGEST_NAME)) for name in names) > 36 else ""
    head = "".join(f'<th title="{escape(name)}">{isolated(short(name, _LONGEST_NAME))}</th>' for name in names)
    lines = [
        f'<tr><th scope="row" title="{escape(name)}">{isolated(short(name, _LONGEST_NAME))}</th>'
        + "".join(
            f'<td style="background:rgba(var(--heat),{0.62 * share:.3f})">\n{count}\n</td>'
            for count, share in zip(numbers.tolist(), part.tolist(), strict=True)
        )
        + "</tr>"
        for name, numbers, part in zip(names, counts, shares, strict=True)
    ]
    return (
        f'{note}<div class="scroll"><table class="matrix"><thead><tr{turn}><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _charts(findings: Findings) -> list[tuple[str, str]]:
    """Return (title, HTML) of the charts of a split."""
    charts = []
    if counts := findings.get("counts"):
        colors = ("var(--base)", "var(--train)") if len(counts["series"]) > 1 else ("var(--train)",)
        charts.append((counts["title"], bar_chart(counts["groups"], counts["series"], colors)))
    if (points := findings.get("points")) and points["values"]:
        charts.append((points["title"], point_chart(points["values"], points["x"], points["y"])))
    return charts


def _share(findings: Findings) -> str:
    wrong, scored = findings.get("wrong"), findings.get("scored", 0)
    shown = len(findings.get("mistakes") or ())
    if wrong is None:
        return f"the {shown:,} largest errors of {scored:,} records"
    return f"{wrong:,} of {scored:,} records are wrong; the {min(shown, wrong):,} worst"


def _mistakes(findings: Findings) -> str:
    mistakes = findings["mistakes"]
    note = '<p class="soft">Marked words: correct tag → predicted tag.</p>' if "words" in mistakes[0] else ""
    return f'{note}<ul class="list">{"".join(map(_mistake, mistakes))}</ul>'


def _mistake(mistake: Mistake) -> str:
    """Return the texts of a record, the correct answer and the prediction."""
    if tagged := mistake.get("words"):
        marked = " ".join(
            isolated(word)
            if right == tag
            else f'<span class="mask">{isolated(word)}</span> '
            f'<span class="tag">{isolated(f"{right} → {tag}")}</span>'
            for word, right, tag in tagged
        )
        texts = f'<div dir="auto">{marked}</div>'
    else:
        parts = [mistake[key] for key in ("text", "text_pair") if mistake.get(key)]  # type: ignore[literal-required]
        texts = "".join(f'<div class="text" dir="auto">{escape(part)}</div>' for part in parts)
    answers = []
    if "gold" in mistake:
        answers.append(f'<span>correct: <b class="mask right">{isolated(mistake["gold"])}</b></span>')
    if "predicted" in mistake:
        predicted = mistake["predicted"].removeprefix("predicted ")  # of older versions
        answers.append(f'<span>predicted: <b class="mask">{isolated(predicted)}</b></span>')
    score = mistake.get("score")
    if isinstance(score, float) and math.isfinite(score):
        words = f"{score:.0%} sure" if 0 <= score <= 1 else f"score {score:.3g}"
        answers.append(f'<span class="soft">{words}</span>')
    return f'<li>{texts}<div class="answer">{" ".join(answers)}</div></li>'
