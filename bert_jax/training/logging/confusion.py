"""The confusion matrix of a classifier, drawn for the report of its run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Of more classes the counts would not be legible, nor would all the names of still more.
_MOST_COUNTS, _MOST_NAMES = 20, 40
_LONGEST_NAME = 24


def side_of(classes: int) -> float:
    """Inches of the square that a matrix of so many classes needs, names included."""
    return min(9.0, max(3.6, 1.6 + 0.37 * classes))


def draw_confusion(figure: Any, matrices: Mapping[str, Mapping[str, Any]], columns: int) -> None:
    """Draw a matrix for each split into a matplotlib (sub)figure, ``columns`` of them side by side.

    ``matrices``: by split {"labels": names [C], "counts": [C][C]}, a row for each class as it is given, a column as
    it is predicted. The colour is the share of the row; cells show counts up to 20 classes.
    """
    rows = math.ceil(len(matrices) / columns)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (split, matrix) in zip(places, matrices.items(), strict=False):
        _draw_matrix(axes, split, [_short(str(name)) for name in matrix["labels"]], np.array(matrix["counts"]))
    for axes in list(places)[len(matrices) :]:
        axes.set_axis_off()


def _draw_matrix(axes: Any, split: str, names: list[str], counts: np.ndarray) -> None:
    classes = len(names)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="none")
    if classes <= _MOST_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "#495057"
            axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=7)
    shown = range(0, classes, math.ceil(classes / _MOST_NAMES))
    text = {"labels": [names[i] for i in shown], "parse_math": False, "fontsize": 8 if len(shown) <= 12 else 6.5}
    axes.set_yticks(shown, **text)
    axes.set_xticks(shown, **text, rotation=0 if sum(map(len, names)) <= 24 else 90)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_anchor("W")
    axes.set(title=f"{split}: confusion matrix", xlabel="predicted", ylabel="given")


def _short(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
