"""Parts of a report about a fine-tuned model: scores, classes and tags, confusion matrices, mistakes."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.objectives.display import Confusion, Findings, Kinds, Mistake
from bert_jax.training.logging.charts import bar_chart, point_chart
from bert_jax.training.logging.curves import different_scores
from bert_jax.training.logging.page import (
    card,
    escape,
    folded,
    format_value,
    isolated,
    listed,
    pair,
    section,
    short,
    table,
    track,
    words_of,
)
from bert_jax.training.logging.run_files import RunFiles
from bert_jax.training.logging.verdict import NEAREST_SENTENCE, count_of_wrong

# Number of scores of a split that are shown, of tiles among them, and of classes or tags.
_MOST_SCORES, _TILES, _MOST_CLASSES = 6, 2, 40
# Number of classes up to which a confusion matrix is shown, and otherwise of the most frequent confusions.
MOST_CELLS, _MOST_CONFUSIONS = 20, 15
_LONGEST_NAME = 24
# Number of wrong examples that are shown without a click.
_OPEN = 4
# Width of a letter in the heads of a confusion matrix in pixels, and letters of its corner.
_LETTER, _HEAD_LETTERS = 8.0, 11
# Width of the box of a confusion matrix on a phone, and beside another box on the narrowest and on a wide page.
_PHONE, _HALF, _WIDE_HALF = 330.0, 390.0, 510.0

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
    matrices = _matrices(run)
    scores, findings = run.scores() if run.is_finetuning else {}, run.data.get("findings") or {}
    cards, below = list[str](), list[str]()
    for split in dict.fromkeys([*scores, *matrices, *findings]):
        values = scores.get(split, {})
        names = [name for name in _first(run, split, values) if "/" not in name]
        if names:
            cards.append(card(_score_table(run, split, values, names[:_MOST_SCORES]), heading=_heading(run, split)))
        if split in matrices:
            content, is_wide = _confusion(matrices[split])
            (below if is_wide else cards).append(card(content, heading=f"{split}: confusion matrix"))
        found = findings.get(split, {})
        if classes := _classes(values, *_counts_of(matrices.get(split), found)):
            cards.append(card(classes, heading=f"{split}: by class or tag"))
        if kinds := found.get("kinds"):
            cards.append(card(_kinds(kinds), heading=f"{split}: right answers and kinds of mistakes"))
        if types := found.get("types"):
            content, is_wide = _confusion(types, "types")
            (below if is_wide else cards).append(card(content, heading=f"{split}: types of entities"))
        if slices := _slices(found):
            cards.append(card(slices, heading=f"{split}: by group"))
    mistakes = [
        card(_mistakes(one), heading=f"{split}: {_share(one)}")
        for split, one in findings.items()
        if one.get("mistakes")
    ]
    heading = "Scores" if run.state == "complete" else "Scores of the last evaluation"
    return [
        section(heading, pair(*cards) + "".join(below)),
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
    if windows := (run.data.get("findings") or {}).get(split, {}).get("windows"):
        parts.append(f"{windows:,} too long for one input and read in windows")
    return f"{split}: {', '.join(parts)}" if parts else split


def _plain_scores(run: RunFiles, split: str) -> dict[str, float | None]:
    """Return the scores of the answer without training, by name: its stored one, and those that the counts of
    classes or tags determine."""
    answer = run.plain_answers().get(split)
    if not answer:
        return {}
    found: dict[str, float | None] = {answer["metric"]: answer["value"]}
    support = (run.data.get("findings") or {}).get(split, {}).get("support")
    if support and support["answer"] == answer["answer"]:
        found.setdefault("accuracy", support["accuracy"])
    matrix = _matrices(run).get(split)
    if matrix and matrix["labels"]:
        sizes = np.array(_sizes(matrix))
        shares = {f"class {label} for all": float(n) for label, n in zip(matrix["labels"], sizes, strict=False)}
        if answer["answer"] in shares and sizes.sum():
            share = shares[answer["answer"]] / float(sizes.sum())
            f1 = 2 * share / (1 + share)
            known = {"accuracy": share, "f1_macro": f1 / int((sizes > 0).sum()), "f1_weighted": share * f1}
            found = {**known, **found}
    return found


def _matrices(run: RunFiles) -> dict[str, Confusion]:
    """Return the confusion matrices by split."""
    matrices = dict(run.data.get("confusion") or {})
    return matrices | {one["split"]: one["confusion_matrix"] for one in run.results if "confusion_matrix" in one}


def _score_table(run: RunFiles, split: str, values: Scores, names: Sequence[str]) -> str:
    answer, start = run.plain_answers().get(split), run.start_scores(split)
    if start and answer and answer["answer"] == "before training":
        answer = None
    intervals: Mapping[str, Any] = next((one["metrics"] for one in run.results if one["split"] == split), {})
    plain = _plain_scores(run, split)
    header = ["", "score", ""]
    header += [isolated(short(answer["answer"]))] if answer else []
    header += ["before training"] if start else []
    rows = []
    for name in names:
        value = values[name]
        known = {"before training": start.get(name)} if start else {}
        if answer and name in plain:
            known[answer["answer"]] = plain[name]
        is_share = value is not None and 0 <= value <= 1 and not name.endswith(("loss", "mse", "mae"))
        marks = [(x, text) for text, x in known.items() if x is not None]
        interval = intervals.get(name, {}).get("ci95")
        row = [escape(words_of(name)), f"<b>{escape(format_value(name, value))}</b>"]
        if interval:
            row[1] += f"<small>{' to '.join(escape(format_value(name, x)) for x in interval)}</small>"
        row.append(track(value or 0.0, marks) if is_share else "")
        if answer:
            row.append(escape(format_value(name, plain[name])) if name in plain else "")
        if start:
            row.append(escape(format_value(name, start.get(name))))
        rows.append(row)
    notes = "Small: the 95% interval. " if any(one.get("ci95") for one in intervals.values()) else ""
    if any("<u " in row[2] for row in rows):
        compared = [answer["answer"]] if answer else []
        compared += ["before training"] if start else []
        notes += f"The line in a bar: {isolated(' or '.join(compared))}. "
    if answer and answer["answer"] == NEAREST_SENTENCE:
        notes += "This baseline answers with the sentence of the passage that has the most words of the question."
    return table(header, rows, numbers=(1, *range(3, len(header))), css="whole") + f'<p class="soft">{notes}</p>'


def _counts_of(matrix: Confusion | None, findings: Findings) -> tuple[str, Mapping[str, int]]:
    """Return the unit and the number of records, entities or tags by class or type, as far as they are known."""
    if support := findings.get("support"):
        return support["unit"], support["counts"]
    if matrix is None:
        return "", {}
    return "records", {str(label): size for label, size in zip(matrix["labels"], _sizes(matrix), strict=False)}


def _sizes(matrix: Confusion) -> list[int]:
    """Return the number of records of each correct class."""
    return matrix["sizes"] if "sizes" in matrix else [sum(row) for row in matrix["counts"]]


def _classes(values: Scores, unit: str, counts: Mapping[str, int]) -> str:
    """Return a table of the scores NAME/CLASS, with a bar of the first of them, and the numbers of ``unit``."""
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
        count = [f"{counts[group]:,}" if group in counts else ""] if counts else []
        rows.append([isolated(group), bar, *(escape(format_value(one, row.get(one))) for one in metrics), *count])
    left = len(found) - len(rows)
    note = f'<p class="soft">{left:,} more are in metrics.json</p>' if left > 0 else ""
    header = ["", "", *(escape(words_of(metric)) for metric in metrics), *([unit] if counts else [])]
    if unit == "entities":
        note += '<p class="soft">An entity is right if its type and all of its words are right.</p>'
    return table(header, rows, numbers=range(2, len(header)), css="whole groups") + note if rows else ""


def _kinds(kinds: Kinds) -> str:
    """Return the number and the share of right answers and of each kind of mistake."""
    total = sum(kinds["counts"].values()) or 1
    rows = [
        [escape(name), track(count / total), f"{count:,}", f"{count / total:.1%}"]
        for name, count in kinds["counts"].items()
    ]
    return table(["", "", escape(kinds["unit"]), "share"], rows, numbers=(2, 3), css="whole groups")


def _confusion(matrix: Confusion, unit: str = "records") -> tuple[str, bool]:
    """Return the counts of ``unit`` as a table whose cells are colored by their share of the row, and True if it
    is wider than a half of the page; of many classes, and on screens on which this table would be cut, the most
    frequent confusions."""
    names = [str(name) for name in matrix["labels"]]
    if not names:
        return "", False
    if len(names) > MOST_CELLS:
        return _confusions(names, matrix, unit), False
    counts = np.array(matrix["counts"])
    note = (
        f'<p class="soft">Rows: correct class. Columns: predicted class. Color: share of the {unit} of the row; '
        "red: wrong. "
        f"{np.trace(counts):,} of {counts.sum():,} {unit} are right.</p>"
    )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    width = max(44, min(72, 360 // len(names)))
    longest = max(len(short(name, _LONGEST_NAME)) for name in names)
    longest_word = max(len(word) for name in names for word in re.split(r"[\s-]", short(name, _LONGEST_NAME)))
    is_long = longest > 2 * width / _LETTER or longest_word > width / _LETTER
    turn = ' class="turn"' if is_long else ""
    head = "".join(f'<th title="{escape(name)}">{isolated(short(name, _LONGEST_NAME))}</th>' for name in names)
    lines = [
        f'<tr><th scope="row" title="{escape(name)}">{isolated(short(name, _LONGEST_NAME))}</th>'
        + "".join(
            f'<td style="background:{_heat(share, is_right=place == row)}">\n{count}\n</td>'
            for place, (count, share) in enumerate(zip(numbers.tolist(), part.tolist(), strict=True))
        )
        + "</tr>"
        for row, (name, numbers, part) in enumerate(zip(names, counts, shares, strict=True))
    ]
    head = f"<thead><tr{turn}><th>predicted →<br>correct ↓</th>{head}</tr></thead>"
    whole = f'<table class="matrix" style="--w:{width}px">{head}<tbody>{"".join(lines)}</tbody></table>'
    matrix_of_all = f'{note}<div class="scroll">{whole}</div>'
    whole_width = max(longest, _HEAD_LETTERS) * _LETTER + width * len(names)
    if whole_width < _PHONE:
        return matrix_of_all, False
    css, other = "wider" if whole_width > _HALF else "wide", _confusions(names, matrix, unit)
    box = f'<div class="{css}">{matrix_of_all}</div><div class="narrow">{other}</div>'
    return box, whole_width > _WIDE_HALF


def _heat(share: float, *, is_right: bool) -> str:
    """Return the color of a cell of a confusion matrix. Also a small share of errors is visible."""
    if is_right or not share:
        return f"rgba(var(--heat),{0.62 * share:.3f})"
    return f"rgba(var(--error),{0.15 + 0.5 * share:.3f})"


def _confusions(names: Sequence[str], matrix: Confusion, unit: str) -> str:
    """Return the most frequent confusions as a list."""
    sizes = _sizes(matrix)
    if "largest" in matrix:
        right, largest = matrix["right"], matrix["largest"][:_MOST_CONFUSIONS]
    else:
        counts = np.array(matrix["counts"])
        right, wrong = int(np.trace(counts)), counts - np.diag(np.diag(counts))
        order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_MOST_CONFUSIONS]
        largest = [(*divmod(int(one), len(names)), int(wrong.flat[one])) for one in order if wrong.flat[one]]
    rows = [
        [
            isolated(short(names[a], _LONGEST_NAME)),
            isolated(short(names[b], _LONGEST_NAME)),
            f"{count:,}",
            f"{sizes[a]:,}",
        ]
        for a, b, count in largest
    ]
    note = f"{right:,} of {sum(sizes):,} {unit} are right."
    if not rows:
        return f'<p class="soft">{note}</p>'
    header = ["correct", "predicted", unit, "of"]
    note += " The most frequent confusions:"
    return f'<p class="soft">{note}</p>' + table(header, rows, numbers=(2, 3))


def _slices(findings: Findings) -> str:
    """Return tables of the score by group."""
    return "".join(
        table(
            [
                escape(one["title"]),
                "",
                *map(escape, map(words_of, [one["metric"], *one.get("others", ())])),
                "records",
            ],
            [
                [
                    escape(name),
                    track(value),
                    escape(format_value(one["metric"], value)),
                    *(escape(format_value(other, of[place])) for other, of in one.get("others", {}).items()),
                    f"{count:,}",
                ]
                for place, (name, count, value) in enumerate(one["groups"])
            ],
            numbers=range(2, 4 + len(one.get("others", ()))),
            css="whole groups",
        )
        for one in findings.get("slices", ())
    )


def _charts(findings: Findings) -> list[tuple[str, str]]:
    """Return (title, HTML) of the charts of a split."""
    charts = []
    if counts := findings.get("counts"):
        colors = ("var(--base)", "var(--train)") if len(counts["series"]) > 1 else ("var(--train)",)
        charts.append((counts["title"], bar_chart(counts["groups"], counts["series"], colors)))
    if (points := findings.get("points")) and points["values"]:
        values, x, y = points["values"], points["x"], points["y"]
        if x == "label" and y != "predicted":  # of another scale, so that only the order can be compared
            x, y, values = "rank of the label (%)", f"rank of the {y} (%)", _ranks(values)
            charts.append((f"order of {points['y']} and label", point_chart(values, x, y, alike=True)))
        else:
            is_value = y == "predicted"
            charts.append((points["title"], point_chart(values, x, y, alike=is_value, middle=is_value)))
    return charts


def _ranks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the ranks of finite values in percent; equal values have their mean rank."""
    columns = []
    for values in np.array(points, float)[np.isfinite(np.array(points, float)).all(axis=1)].T:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = np.cumsum(counts) - (counts - 1) / 2
        columns.append(100 * (ranks[places] - 0.5) / len(values))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _share(findings: Findings) -> str:
    wrong, scored = findings.get("wrong"), findings.get("scored", 0)
    shown = len(findings.get("mistakes") or ())
    if wrong is None:
        return f"the {shown:,} largest errors of {scored:,} records"
    which = f"; the {shown:,} worst" if shown < wrong else ""
    return count_of_wrong(wrong, scored) + which


def _mistakes(findings: Findings) -> str:
    mistakes = findings["mistakes"]
    is_tagged = "words" in mistakes[0]
    note = (
        (
            '<p class="soft">Marked: not entirely right; below: correct → predicted, with the words of an entity '
            "that is only a part of those marked.</p>"
        )
        if is_tagged
        else ""
    )
    first, more = mistakes[:_OPEN], mistakes[_OPEN:]
    rest = folded(f"{len(more):,} more", _list(more)) if more else ""
    return note + _list(first) + rest


def _list(mistakes: Sequence[Mistake]) -> str:
    return listed(map(_mistake, mistakes))


def _marked(text: str, marks: Sequence[tuple[int, int, str]]) -> str:
    """Return text as HTML with marked answers; where the correct and the predicted one overlap, in both colors."""
    ends = sorted({0, len(text), *(place for first, end, _ in marks for place in (first, end))})
    parts = []
    for start, stop in itertools.pairwise(ends):
        names = {name for first, end, name in marks if first <= start < end}
        css = {0: "", 1: "mask right" if "gold" in names else "mask", 2: "mask both"}[len(names)]
        part = escape(text[start:stop])
        parts.append(f'<span class="{css}">{part}</span>' if css else part)
    return "".join(parts)


def _wrong_groups(tagged: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return the texts of the groups of words, each with an empty string if it is correct, otherwise with its
    correct and predicted types. All words of a correct or predicted entity are in one group, and so are the words
    of entities that overlap."""
    groups = list[list[Sequence[str]]]()
    for word in tagged:
        if groups and any(_continues(groups[-1][-1][place], word[place]) for place in (1, 2)):
            groups[-1].append(word)
        else:
            groups.append([word])
    return [(" ".join(word for word, *_ in group), _change_of(group)) for group in groups]


def _continues(before: str, tag: str) -> bool:
    """Return True if a word with ``tag`` belongs to the entity of the word before it."""
    return tag.startswith(("I-", "E-")) and not before.startswith(("S-", "E-")) and _type(before) == _type(tag)


def _change_of(group: Sequence[Sequence[str]]) -> str:
    """Return the correct and the predicted types of a group of words, with the words of those that cover only a
    part of it; empty if they are the same."""
    tags = [[word[place] for word in group] for place in (1, 2)]
    if tags[0] == tags[1]:
        return ""
    sides = [_entities([word for word, *_ in group], own) for own in tags]
    if sides[0] == sides[1]:
        sides = [" ".join(own) for own in tags]
    return " → ".join(sides)


def _entities(words: Sequence[str], tags: Sequence[str]) -> str:
    """Return the types of the entities of ``words``, with the words of those that are only a part of these."""
    found = list[tuple[str, list[str]]]()
    for place, (word, tag) in enumerate(zip(words, tags, strict=True)):
        if place and found and _continues(tags[place - 1], tag):
            found[-1][1].append(word)
        elif tag != "O":
            found.append((_type(tag), [word]))
    parts = [kind if len(own) == len(words) else f"{kind} (“{' '.join(own)}”)" for kind, own in found]
    return ", ".join(parts) or "none"


def _type(tag: str) -> str:
    """Return the type of an entity tag, other tags as they are."""
    prefix, dash, kind = tag.partition("-")
    return "none" if tag == "O" else kind if dash and prefix in ("B", "I", "E", "S") else tag


def _mistake(mistake: Mistake) -> str:
    """Return the texts of a record, the correct answer and the prediction."""
    if tagged := mistake.get("words"):
        groups = _wrong_groups(tagged)
        marked = " ".join(
            f'<span class="mask">{isolated(text)}</span>' if change else isolated(text) for text, change in groups
        )
        texts = f'<div dir="auto">{marked}</div>'
        changes = " · ".join(isolated(f"{text}: {change}") for text, change in groups if change)
        texts += f'<div class="soft">{changes}</div>'
    else:
        parts = [escape(mistake["text"])] if mistake.get("text") else []
        parts += [_marked(mistake["text_pair"], mistake.get("marks") or ())] if mistake.get("text_pair") else []
        texts = "".join(f'<div class="text" dir="auto">{part}</div>' for part in parts)
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
    return f'{texts}<div class="answer">{" ".join(answers)}</div>'
