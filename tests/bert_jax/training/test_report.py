"""The report on synthetic runs of all sizes."""

import json
import re
import struct
import warnings
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from html.parser import HTMLParser

import numpy as np
import pytest

from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.training.logging import charts
from bert_jax.training.logging.curves import draw_curves, series, smooth, thin
from bert_jax.training.logging.report import format_value, write_report

DISPLAY = MaskedLm.display
pytestmark = pytest.mark.usefixtures("curves")

DATA = {
    "title": "run <1>",
    "summary": ["held-out loss & more"],
    "evaluation": {"mlm_loss": 5.3125, "mlm_accuracy": 0.244, "nsp_loss": None, "mlm_targets": 13211},
    "unigram_loss": 6.742,
    "filled_masks": [
        {
            "text": "the <i>king</i> of [MASK] was [MASK] and [MASK] .",
            "masks": [
                {"answer": "france", "predictions": [["france", 0.31], ["</script>", 0.2]]},
                {"answer": "old", "predictions": [["great", 0.25]]},
            ],
        }
    ],
}


def write_metrics(workdir, count, *, evaluations=True, nsp=True):
    lines = []
    for step in range(1, count + 1):
        line = {"step": step, "loss": 9.0 - step / count, "mlm_loss": 8.0, "learning_rate": 1e-4}
        line |= {"grad_norm": None if step % 2 else 10.0 ** (step % 7), "tokens_per_second": 8e3, "mfu": None}
        line["nsp_loss"] = 0.6 if nsp else None
        lines.append(line)
        if evaluations and step % 10 == 0:
            lines.append({"step": step, "split": "eval", "mlm_loss": 7.5, "mlm_accuracy": 0.25})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def matrix_of(classes):
    """Counts of so many classes, all of them different; of the last class there is no record."""
    counts = 1000 + np.arange(classes**2).reshape(classes, classes)
    counts[-1] = 0
    return {"labels": [f"$class_{i}$" for i in range(classes)], "counts": counts.tolist()}


class _Balance(HTMLParser):
    """Checks that every element is closed in order, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(workdir):
    """The page's source and text, after checks that hold for every page."""
    page = re.sub('"data:image/png;base64,[^"]*"', '"#"', (workdir / "report.html").read_text())
    # Nothing is loaded from elsewhere.
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|src=|url\((?!#)", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    for svg in re.findall("<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    png = (workdir / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 500 and height > 300
    return page, parser.text


def test_everything_there(tmp_path):
    write_metrics(tmp_path, 200)
    (tmp_path / "config.yaml").write_text("model:\n  vocab_size: 8192  # <b>\n")
    assert write_report(tmp_path, DISPLAY, DATA) == tmp_path / "report.html"
    page, text = read_page(tmp_path)
    for words in (
        "run <1>",
        "held-out loss & more",
        "vocab_size: 8192  # <b>",
        "5.312",
        "24.4%",
        "13,211",
        "6.742",
    ):
        assert words in text
    assert "of france was great and [MASK] ." in text  # a mask without predictions stays
    assert '<span class="mask right">france</span>' in page and '<span class="mask">great</span>' in page
    assert "the <i>king</i>" in text and "</script> 20%" in text  # escaped, so it reads as written
    titles = ("masked-token loss (nats)", "sentence-pair loss (nats)", "learning rate", "gradient norm", "unigram")
    for title in titles:
        assert title in text
    assert "model FLOP utilization" not in text  # null throughout: no panel, no tile


@pytest.mark.slow
def test_again_without_data_gives_the_same(tmp_path):
    write_metrics(tmp_path, 30)
    write_report(tmp_path, DISPLAY, DATA)
    first = (tmp_path / "report.html").read_bytes()
    write_report(tmp_path, DISPLAY)
    assert (tmp_path / "report.html").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl", "report.html", "report.png", "report_data.json",
    ]  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_runs(tmp_path, count):
    if count:
        write_metrics(tmp_path, count)
    write_report(tmp_path, DISPLAY)
    text = read_page(tmp_path)[1]
    assert ("no metrics yet" in text) == (count == 0)


@pytest.mark.slow
def test_without_evaluation_and_sentence_pairs(tmp_path):
    write_metrics(tmp_path, 50, evaluations=False, nsp=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 51, "lo')  # the run is still writing
    write_report(tmp_path, DISPLAY)
    text = read_page(tmp_path)[1]
    assert "held-out" not in text
    assert "sentence-pair" not in text
    assert "masked-token loss (nats)" in text


@pytest.mark.slow
def test_long_runs_are_thinned(tmp_path):
    write_metrics(tmp_path, 100_000)
    write_report(tmp_path, DISPLAY)
    read_page(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_thin_keeps_means_and_the_last_point():
    steps, values = np.arange(10_001.0), np.random.default_rng(0).normal(size=10_001)
    thin_steps, thin_values = thin(steps, values, 101)
    assert len(thin_steps) == len(thin_values) == 101
    np.testing.assert_allclose(thin_values[:-1], values[:-1].reshape(100, 100).mean(1))
    assert (thin_steps[-1], thin_values[-1]) == (10_000, values[-1])
    np.testing.assert_array_equal(thin(steps[:50], values[:50], 50)[1], values[:50])


def test_smooth_is_a_running_mean():
    values = np.random.default_rng(0).normal(size=120)
    expected = [values[max(0, i - 3) : i + 4].mean() for i in range(120)]
    np.testing.assert_allclose(smooth(values), expected)
    np.testing.assert_array_equal(smooth(values[:39]), values[:39])


def test_series_splits_and_skips_nulls():
    records = [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 3.0},
        {"step": 2, "split": "eval", "loss": 4.0},
        {"step": 3},
    ]
    assert [a.tolist() for a in series(records, "train", "loss")] == [[2], [3.0]]
    assert [a.tolist() for a in series(records, "eval", "loss")] == [[2], [4.0]]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mlm_loss", 5.31249, "5.312"),
        ("nsp_accuracy", 0.5, "50.0%"),
        ("padding_fraction", 0.0, "0.0%"),
        ("mfu", None, "n/a"),
        ("mlm_targets", 13211, "13,211"),
        ("f1", 0.5, "50.0%"),
        ("dev: precision_macro", 0.05, "5.0%"),
        ("recall/PER", 1.0, "100.0%"),
        ("pearson", 0.5, "0.5000"),
        ("tokens", 9192.25, "9192"),
        ("mlm_targets", 13211.0, "13,211"),
        ("loss", float("inf"), "inf"),
        ("note", "text", "text"),
    ],
)
def test_format_value(name, value, text):
    assert format_value(name, value) == text


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "names"), [(20, 20 + 15), (150, 15)])
def test_confusion_matrices(tmp_path, classes, names):
    """Up to 20 classes, a table with their names at two sides, and for small screens the most frequent confusions;
    of more, only these."""
    matrices = {split: matrix_of(classes) for split in ("one", "two")[: 1 if classes == 20 else 2]}
    write_report(tmp_path, DISPLAY, {"confusion": matrices})
    text = read_page(tmp_path)[1]
    shown = re.findall(r"^\s*(\d{4,})\s*$", text, re.MULTILINE)
    expected = [f"{count}" for matrix in matrices.values() for row in matrix["counts"][:-1] for count in row]
    assert sorted(shown) == (sorted(expected) if classes <= 20 else [])
    for split in matrices:
        assert f"{split}: confusion matrix" in text
    if classes > 20:  # the largest count that is not on the diagonal
        assert "$class_148$$class_149$23,349" in text
    # As they are: dollars make no formula.
    assert len(re.findall(r"\$class_\d+\$", text)) == 2 * names * len(matrices)


def test_names_of_classes_in_the_picture(tmp_path):
    """In any script and of any length, without a warning."""
    names = ["\u5929\u5730", "$\\frac$", "two\n words", "x" * 200]
    counts = [[1] * 4] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(tmp_path, DISPLAY, {"confusion": {"dev": {"labels": names, "counts": counts}}})
    text = read_page(tmp_path)[1]
    for name in (*names[:2], "two words", f"{'x' * 23}\u2026"):
        assert name in text


def test_a_task_shows_the_first_metrics_of_its_splits(tmp_path):
    write_metrics(tmp_path, 20, evaluations=False, nsp=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in (10, 20):
            for split in ("dev_matched", "dev_mismatched"):
                values = {"split": split, "accuracy": 0.5 + step / 100, "f1_macro": 0.4, "auroc": 0.3}
                file.write(json.dumps({"step": step, **values}) + "\n")
    page = write_report(tmp_path, DISPLAY, {"evaluation": {"accuracy": 0.7}}).read_text()
    for title in ("dev_matched: accuracy", "dev_matched: f1 macro", "dev_mismatched: accuracy"):
        assert title in page
    assert "auroc" not in page


def test_chinese_letters_have_a_font_where_one_is_installed(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.font_manager.get_font_names", lambda: ["SimHei", "DejaVu Sans", "Noto Sans CJK SC"]
    )
    monkeypatch.setattr("matplotlib.rc_context", lambda style: drawn.append(style["font.family"]) or nullcontext())
    draw_curves([], {"confusion": {"dev": {"labels": ["好评", "差评"], "counts": [[5, 1], [2, 7]]}}}, (), "run")
    assert drawn == [["sans-serif", "Noto Sans CJK SC", "SimHei"]]


def test_the_axis_of_steps_names_round_steps_at_equal_distances(tmp_path):
    write_metrics(tmp_path, 700)
    page = write_report(tmp_path, DISPLAY, DATA).read_text()
    svg = re.findall("<svg.*?</svg>", page, re.DOTALL)[0]
    assert re.findall(r'text-anchor="middle">([^<]*)<', svg) == ["step", "200", "400", "600"]
    for steps, names in (((7, 8), ["7", "8"]), ((3,), ["3"])):
        line = charts.Line(np.array(steps), np.ones(len(steps)), "blue")
        svg = charts.line_chart([line], charts.Scale())
        assert re.findall(r'text-anchor="middle">([^<]*)<', svg) == ["step", *names]


def test_an_axis_in_percent_ends_at_100():
    line = charts.Line(np.array([25, 39]), np.array([0.995, 0.995]), "blue")
    svg = charts.line_chart([line], charts.Scale(percent=True))
    labels = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)%</text>', svg)
    place, highest = max(labels, key=lambda one: float(one[1]))
    assert highest == "100" and float(place) < 30  # near the top, without an empty part above it
