"""The parts of a report about a fine-tuned model: scores, classes, matrices, charts and mistakes."""

import json
import re

import numpy as np
import pytest

from bert_jax.finetuning.supervision import LABELS_ONLY
from bert_jax.finetuning.task_objective import task_display
from bert_jax.objectives.display import MOST_CONFUSIONS
from bert_jax.tasks.text_classification import confusions
from bert_jax.training.logging.curves import draw_curves
from bert_jax.training.logging.report import run_page
from bert_jax.training.logging.run_files import read_run

TASK = task_display(LABELS_ONLY)


def page_of(folder, data, entry=None):
    """The page of a complete run with the content ``data`` of report_data.json and an entry of metrics.json."""
    (folder / "config.yaml").write_text("task: {kind: classification}\n")
    (folder / "metrics.json").write_text(json.dumps([entry] if entry else []))
    (folder / "report_data.json").write_text(json.dumps(data))
    return run_page(read_run(folder), TASK)


def entry_of(answer, metric, value, **scores):
    metrics = {name.replace("__", "/"): {"value": own, "ci95": None} for name, own in scores.items()}
    return {
        "split": "dev",
        "n": 9,
        "metrics": metrics,
        "baseline": {"answer": answer, "metric": metric, "value": value},
    }


def test_wrong_words_of_one_entity_stand_together(tmp_path):
    words = [
        ("All", "B-X", "O"),
        ("Clad", "I-X", "O"),
        ("Bugatti", "B-X", "O"),
        ("is", "O", "O"),
        ("new", "O", "B-Y"),
    ]
    words += [("Ann", "B-Z", "I-Z"), ("runs", "VERB", "NOUN")]
    page = page_of(tmp_path, {"findings": {"dev": {"scored": 1, "wrong": 1, "mistakes": [{"words": words}]}}})
    assert '<span class="mask"><bdi>All Clad</bdi></span> <span class="mask"><bdi>Bugatti</bdi></span> ' in page
    changes = ("All Clad: X → none", "Bugatti: X → none", "new: none → Y", "Ann: B-Z → I-Z", "runs: VERB → NOUN")
    assert " · ".join(f"<bdi>{one}</bdi>" for one in changes) in page


def test_entities_that_are_partly_right_stand_whole(tmp_path):
    words = [("Paw", "B-X", "B-Y"), ("and", "I-X", "O"), ("Friends", "I-X", "O"), ("met", "O", "O")]
    words += [("DJ", "B-Y", "B-Y"), ("Switch", "I-Y", "O"), ("Ivory", "B-Z", "B-Z"), ("Coast", "I-Z", "I-Z")]
    words += [
        ("Ms", "O", "B-Y"),
        ("Li", "B-Y", "I-Y"),
        ("Ed", "I-Y", "B-Y"),
        ("Bo", "B-X", "I-X"),
        ("Yu", "I-X", "I-X"),
    ]
    page = page_of(tmp_path, {"findings": {"dev": {"scored": 1, "wrong": 1, "mistakes": [{"words": words}]}}})
    changes = ("Paw and Friends: X → Y (“Paw”)", "DJ Switch: Y → Y (“DJ”)",
               "Ms Li Ed: Y (“Li Ed”) → Y (“Ms Li”), Y (“Ed”)", "Bo Yu: B-X I-X → I-X I-X")  # fmt: skip
    assert " · ".join(f"<bdi>{one}</bdi>" for one in changes) in page
    assert '<span class="mask"><bdi>DJ Switch</bdi></span> <bdi>Ivory Coast</bdi> <span' in page


def test_types_that_are_never_found_are_named(tmp_path):
    for none_of_y, css in ((0.0, "doubtful"), (0.5, "good")):
        support = {"unit": "entities", "counts": {"X": 4, "Y": 1, "Z": 2, "none": 0}, "answer": "", "accuracy": 0.5}
        entry = entry_of("tag O for all", "f1", 0.0, f1=0.5, f1__X=0.9, f1__Y=none_of_y, f1__Z=0.0, f1__none=0.0)
        page = page_of(tmp_path, {"findings": {"dev": {"support": support}}}, entry)
        named = (
            "2 of the 3 types is found correctly (f1 0; each type counts once): Y, Z."
            if css == "doubtful"
            else "1 of the 3 types is"
        )
        assert named in page and f'<div class="card verdict {css}">' in page


def test_entities_have_their_numbers_and_words_their_baseline(tmp_path):
    support = {"unit": "entities", "counts": {"X": 4711}, "answer": "tag O for all", "accuracy": 0.898}
    entry = entry_of("tag O for all", "f1", 0.0, f1=0.5, accuracy=0.9, f1__X=0.5)
    page = page_of(tmp_path, {"findings": {"dev": {"support": support}}}, entry)
    assert '<td class="n">4,711</td>' in page and '<td class="n">89.8%</td>' in page
    assert "The line in a bar: <bdi>tag O for all</bdi>." in page and "An entity is right if" in page
    # Not of another tag, the most frequent one of the training records.
    entry["baseline"]["answer"] = "tag X for all"
    assert "89.8%" not in page_of(tmp_path, {"findings": {"dev": {"support": support}}}, entry)


def test_classes_have_their_numbers_and_averages_their_baseline(tmp_path):
    matrix = {"labels": ["a", "b", "c"], "counts": [[5, 1, 0], [1, 1, 0], [0, 0, 0]]}
    entry = entry_of("class a for all", "accuracy", 0.75, accuracy=0.8, f1_macro=0.5, f1_weighted=0.7, f1__a=0.9)
    page = page_of(tmp_path, {"confusion": {"dev": matrix}}, entry)
    assert '<th class="n">records</th>' in page and '<td class="n">6</td>' in page
    f1 = 2 * 0.75 / 1.75  # precision 0.75, recall 1
    assert f'<td class="n">{f1 / 2:.1%}</td>' in page and f'<td class="n">{0.75 * f1:.1%}</td>' in page
    assert page.count("predicted →<br>correct ↓") == 1


def test_a_matrix_that_is_wider_than_a_phone_is_also_a_list(tmp_path):
    six = [f"class {number}" for number in range(6)]
    for names, css in ((["no", "yes"], ""), (["a", "b", "c", "d"], "wide"), (six, "wider")):
        counts = np.arange(len(names) ** 2).reshape(len(names), -1).tolist()
        page = page_of(tmp_path, {"confusion": {"dev": {"labels": names, "counts": counts}}})
        assert re.findall('<div class="(wider?|narrow)">', page) == ([css, "narrow"] if css else [])
        assert '<table class="matrix"' in page and ("The most frequent confusions:" in page) == bool(css)
    row = "<bdi>class 5</bdi></th><td><bdi>class 4</bdi></td>" + '<td class="n">34</td><td class="n">195</td>'
    assert row in page  # of the last row, 30 to 35


def test_kinds_of_mistakes_and_probabilities_are_stated(tmp_path):
    kinds = {"right": 0, "missed": 3, "spurious": 0}
    types = {"labels": ["X", "none"], "counts": [[0, 3], [0, 0]]}
    found = {"kinds": {"unit": "entities", "counts": kinds}, "types": types, "windows": 2}
    entry = entry_of("tag O for all", "f1", 0.0, f1=0.0)
    page = page_of(tmp_path, {"findings": {"dev": found}}, entry)
    for words in ("The model predicts no entity at all.", '<td class="n">3</td><td class="n">100.0%</td>',
                  "0 of 3 types are right.", "9 records, 2 too long for one input"):  # fmt: skip
        assert words in page
    kinds["spurious"] = 1
    assert "no entity at all" not in page_of(tmp_path, {"findings": {"dev": found}}, entry)
    for mean, words in {0.4: "too low", 0.97: "too high", 0.9: "about as high as the accuracy"}.items():
        found = {"confidence": {"mean": mean, "accuracy": 0.9, "error": 0.123}}
        page = page_of(tmp_path, {"findings": {"dev": found}}, entry)
        assert f"classes is {mean:.1%}, {words} (calibration error 12.3%)." in page


def test_a_few_wrong_records_are_visible(tmp_path):
    matrix = {"labels": ["a", "b"], "counts": [[99, 1], [0, 20]]}
    mistakes = [{"text": f"text {number}"} for number in range(6)]
    found = {"scored": 120, "wrong": 6, "mistakes": mistakes}
    page = page_of(tmp_path, {"findings": {"dev": found}, "confusion": {"dev": matrix}})
    assert '<td style="background:rgba(var(--error),0.155)">\n1\n' in page
    assert page.count("rgba(var(--error)") == 1 and "6 of 120 records are wrong<" in page
    assert page.index("text 3") < page.index("<summary>2 more</summary>") < page.index("text 4")
    page = page_of(tmp_path, {"findings": {"dev": {"scored": 120, "wrong": 1, "mistakes": mistakes[:1]}}})
    assert "1 of 120 records is wrong<" in page and " more</summary>" not in page


def test_of_many_classes_the_largest_confusions_are_kept(tmp_path):
    rng, names = np.random.default_rng(0), [f"class {number}" for number in range(3000)]
    gold = rng.integers(0, 3000, 5000)
    predicted = np.where(rng.random(5000) < 0.5, gold, rng.integers(0, 3000, 5000))
    gold[:30], predicted[:30], gold[30:50], predicted[30:50] = 7, 8, 2999, 0
    matrix = confusions(gold, predicted, names)
    assert "counts" not in matrix and len(matrix["largest"]) == MOST_CONFUSIONS
    assert matrix["largest"][:2] == [(7, 8, 30), (2999, 0, 20)]
    assert matrix["sizes"] == np.bincount(gold, minlength=3000).tolist()
    assert matrix["right"] == int((gold == predicted).sum())
    page = page_of(tmp_path, {"confusion": {"dev": json.loads(json.dumps(matrix))}})
    assert f"{matrix['right']:,} of 5,000 records are right. The most frequent confusions:" in page
    size = int((gold == 7).sum())
    assert f'class 7</bdi></th><td><bdi>class 8</bdi></td><td class="n">30</td><td class="n">{size}</td>' in page
    assert draw_curves([], {"confusion": {"dev": matrix}}, (), "run").startswith(b"\x89PNG")
    few = confusions(gold % 3, predicted % 3, ["a", "b", "c"])
    assert sum(map(sum, few["counts"])) == 5000 and "largest" not in few


def test_answers_have_their_scores_by_length(tmp_path):
    slices = [
        {"title": "length of the <answer>", "metric": "f1", "groups": [["none", 3, 0.25], ["4-5", 1200, 1.0]]}
    ]
    page = page_of(tmp_path, {"findings": {"dev": {"scored": 4, "slices": slices}}})
    assert "<h3>dev: by group</h3>" in page and "length of the &lt;answer&gt;" in page
    assert '<td class="n">25.0%</td><td class="n">3</td>' in page and '<td class="n">1,200</td>' in page


@pytest.mark.parametrize(
    ("y", "words"), [("predicted", "mean of these labels"), ("cosine", "rank of the cosine (%)")]
)
def test_values_of_one_scale_share_their_axes_and_others_are_ranked(tmp_path, y, words):
    points = {"title": "points", "x": "label", "y": y, "values": [(0.0, 2.0), (4.0, 3.0), (4.0, 9.0)]}
    page = page_of(tmp_path, {"findings": {"dev": {"points": points}}})
    assert words in page and "equal values" in page
    assert ("<title>rank of the label (%) 66.7, rank of the cosine (%) 83.3</title>" in page) == (y == "cosine")


def test_correct_and_predicted_answers_are_marked_in_the_text(tmp_path):
    mistake = {"text": "q", "text_pair": "a <b> c d e", "marks": [[2, 7, "gold"], [6, 9, "predicted"]]}
    found = {"scored": 3, "wrong": 2, "mistakes": [mistake]}
    page = page_of(tmp_path, {"findings": {"dev": found}}, entry_of("none", "f1", None, f1=0.25))
    marked = (
        'a <span class="mask right">&lt;b&gt; </span><span class="mask both">c</span><span class="mask"> d</span> e'
    )
    assert marked in page
    assert "2 of 3 records are wrong." in page and "There is no baseline" in page
