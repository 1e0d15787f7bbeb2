"""Reports that compare several runs."""

import fcntl
import json
import re

import numpy as np
import pytest
from report_runs import RELOAD, Tags, without_spans, write_run

import bert_jax


def test_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = "training: {num_steps: 40}\n"
    first = write_run(tmp_path / "first", (3.0, 2.0), steps + "optimizer: {learning_rate: 0.1}\n")
    (tmp_path / "sub").mkdir()
    second = write_run(tmp_path / "sub/first", (2.0, 1.0), steps + "optimizer: {learning_rate: 3}\n")
    target = bert_jax.report(first, second)
    page = (tmp_path / "comparison.html").read_text()
    assert target.resolve() == tmp_path / "comparison.html"
    Tags(page)
    for words in ("first (1)", "first (2)", "<b>2.500</b>", "<b>1.500</b>", "optimizer.<wbr>learning_<wbr>rate"):
        assert words in page
    assert "training.<wbr>num_" not in page and RELOAD not in page
    assert len(re.findall(r'<polyline class="curve [a-z]*" style="--c:var\(--c[01]\)"', page)) >= 4
    with (second / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RELOAD in bert_jax.report(first, second).read_text()


def test_runs_side_by_side_show_differences_and_the_better_value(tmp_path):
    folders = []
    for name, loss, targets in (("a", 2.0, 7), ("b", 1.5, 7)):
        folder = write_run(
            tmp_path / name, config="data: {corpus: [some_text], shards: own}\ntraining: {num_steps: 4000}\n"
        )
        values = {"mlm_loss": loss, "loss": loss, "mlm_accuracy": 0.5, "targets": targets}
        (folder / "report_data.json").write_text(json.dumps({"evaluation": values}))
        folders.append(folder)
    page = without_spans(bert_jax.report(*folders, output=tmp_path / "both.html").read_text())
    assert "<h1><bdi>a</bdi> and <bdi>b</bdi></h1>" in page and "the same number of targets" in page
    row = '<td class="n">2</td><td class="n"><b>1.500</b></td><td class="n">-0.5</td>'
    assert f"<bdi>masked-token loss</bdi></th>{row}" in page and page.count("<b>1.500</b></td>") == 1
    assert "The files contain no intervals. One run of each kind does not show" in page
    assert '<td class="n">+0.0 points</td>' in page and "4,000" in page and "<td>some_text, own</td>" in page
    (folders[1] / "config.yaml").write_text("training: {num_steps: 5000}\n")
    page = bert_jax.report(*folders, output=tmp_path / "both.html").read_text()
    assert "training.<wbr>num_<wbr>steps" in page and "<bdi>5,000</bdi>" in page


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            (2.5, 2.25),
            "<bdi>b</bdi> is better in masked-token loss (<bdi>a</bdi>: 2.500 and <bdi>b</bdi>: 2.250; lower is",
        ),
        ((2.5, 2.5), "Equal in masked-token loss (<bdi>a</bdi>: 2.500 and <bdi>b</bdi>: 2.500)."),
    ],
)
def test_a_comparison_begins_with_the_better_run(tmp_path, losses, words):
    for name, loss in zip("ab", losses, strict=True):
        folder = write_run(tmp_path / name)
        masks = [{"text": f"the [MASK] of {name}", "masks": [{"predictions": [("x", 0.5)], "answer": "y"}]}]
        data = {"evaluation": {"mlm_loss": loss, "mlm_accuracy": 0.5}, "filled_masks": masks}
        (folder / "report_data.json").write_text(json.dumps(data))
        with (folder / "metrics.jsonl").open("a") as file:
            row = {"step": 30, "mlm_loss": 2.75, "tokens_per_second": 70.0, "seconds_per_step": 1.0}
            file.write(json.dumps(row) + "\n")
    page = without_spans(bert_jax.report(tmp_path / "a", tmp_path / "b", output=tmp_path / "both.html").read_text())
    assert words in page and page.index(words) < page.index("Options that differ") < page.index("Curves")
    assert 'masked-token loss in training</bdi></th><td class="n">2.750</td>' in page
    # The only training value, and the held-out one minus it.
    gap = f'masked-token loss, held-out minus training</bdi></th><td class="n">{losses[0] - 2.75:+.4g}</td>'
    for part in ("<h2>Filled masks</h2>", "of a", "of b", f"<td>{tmp_path / 'b'}</td>", "training, mean</th><td>70",
                 gap,                  "last <b>70.00</b>"):  # fmt: skip
        assert part in page


def test_two_pretraining_runs_have_an_interval_over_the_same_rows(tmp_path):
    rng = np.random.default_rng(0)
    weights, gains, folders = rng.integers(50, 60, 40), rng.normal(0.1, 0.05, 40), []
    for name, change in (("a", 0.0), ("b", 1.0)):
        losses = 3 + rng.normal(0, 1e-9, 40) + np.arange(40) - change * gains
        folder = write_run(tmp_path / name)
        data = {"evaluation": {"mlm_loss": 3.0 - change}, "evaluation_groups": {
            "mlm_loss": np.stack([losses * weights, weights], axis=1).tolist()
        }}  # fmt: skip
        (folder / "report_data.json").write_text(json.dumps(data))
        folders.append(folder)
    page = bert_jax.report(*folders, output=tmp_path / "both.html").read_text()
    (low, high) = map(float, re.search(r"<small>(-[\d.]+) to (-[\d.]+)</small>", page).groups())
    # The groups differ by 39 from each other, but the runs by 0.1 in each.
    assert low < -gains.mean() < high and high - low == pytest.approx(4 * 0.05 / 40**0.5, rel=0.3)
    assert "the 95% interval of a difference on the same records, from resampled records. One run" in page
    interval = "(95% interval of <bdi>b</bdi> minus <bdi>a</bdi>: -"
    assert f"The difference is larger than the noise of the held-out records {interval}" in page
    data["evaluation_groups"]["mlm_loss"][3][1] += 1  # other rows
    (folders[1] / "report_data.json").write_text(json.dumps(data))
    assert "<small>" not in bert_jax.report(*folders, output=tmp_path / "both.html").read_text()


def test_two_fine_tuning_runs_have_an_interval_over_the_same_records(tmp_path):
    folders = []
    for name, wrong in (("a", 20), ("b", 10)):
        config = {"task": {"kind": "classification"}, "data": {"labels": ["n", "y"]}}
        folder = write_run(tmp_path / name, config=json.dumps(config), split="dev")
        lines = [
            {"id": str(i), "label": "n" if i < wrong else "y", "gold": "y", "probabilities": {"n": 0.5, "y": 0.5}}
            for i in range(100)
        ]
        (folder / "predictions_dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics = {"accuracy": {"value": 1 - wrong / 100, "ci95": [0.7, 0.9625]}}
        (folder / "metrics.json").write_text(json.dumps([{"split": "dev", "n": 100, "metrics": metrics}]))
        (folder / "report_data.json").write_text("{}")
        folders.append(folder)
    page = bert_jax.report(*folders, output=tmp_path / "both.html").read_text()
    assert '<td class="n">80.0%<small>70.0% to 96.2%</small></td>' in page
    (low, high) = map(float, re.search(r"\+10.0 points<small>\+([\d.]+) to \+([\d.]+)</small>", page).groups())
    # Ten of a hundred records differ: 1.96 sqrt(0.1 0.9 / 100).
    assert low == pytest.approx(10 - 5.88, abs=1.5) and high == pytest.approx(10 + 5.88, abs=1.5)
    assert "the 95% interval of a value and of a difference on the same records" in page
    (folders[1] / "predictions_dev.jsonl").unlink()
    assert "points<small>" not in bert_jax.report(*folders, output=tmp_path / "both.html").read_text()


def runs_with_losses(folder, first, second, split="eval"):
    """The page of two runs with these held-out or training losses at steps 10, 20, ..."""
    folder.mkdir(exist_ok=True)
    for name, losses in (("a", first), ("b", second)):
        write_run(folder / name)
        rows = [{"step": 10 * n, "split": split, "mlm_loss": loss} for n, loss in enumerate(losses, 1)]
        rows += [{"step": 10 * len(losses), "split": "eval", "mlm_loss": losses[-1]}] if split == "train" else []
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bert_jax.report(folder / "a", folder / "b", output=folder / "both.html").read_text()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((4.5, 3.5, 3.0), "grew: +0.5 at step 10, +0.5 at step 20, +1 at step 30."),
        ((6.0, 3.5, 2.5), "stopped shrinking: +2 at step 10, "),
        ((6.0, 4.0, 2.5), "shrank: +2 at step 10, "),
        ((4.5, 4.25, 3.25), "stopped growing: +0.5 at step 10, +1.25 at step 20, +1.25 at step 30."),
        ((4.5, 3.5, 2.5), "stayed about the same: "),
        ((4.5, 3.0, 1.5), "changed its sign: +0.5 at step 10, +0 at step 20, -0.5 at step 30."),
    ],
)
def test_a_comparison_states_the_trend_of_the_difference(tmp_path, second, words):
    page = runs_with_losses(tmp_path, (4.0, 3.0, 2.0), second)
    start = "The difference in masked-token loss on held-out data (<bdi>b</bdi> minus <bdi>a</bdi>)"
    assert f"{start} {words}" in page
    assert "Not all runs are complete: <bdi>a</bdi> is stopped, not complete; <bdi>b</bdi> is stopped" in page
    assert "Whether the difference is larger than noise is unknown: one run of each kind" in page


def test_shown_values_and_differences_agree(tmp_path):
    for name, accuracy in (("plain", 0.2114), ("drop", 0.21151)):
        folder = write_run(tmp_path / name)
        values = {"mlm_loss": 5.0, "mlm_accuracy": accuracy}
        (folder / "report_data.json").write_text(json.dumps({"evaluation": values, "unigram_loss": 6.5}))
        row = {"step": 30, "mlm_loss": 5.5, "mlm_accuracy": 0.2}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n{json.dumps({**row, 'split': 'eval'})}\n")
    page = bert_jax.report(tmp_path / "plain", tmp_path / "drop", output=tmp_path / "both.html").read_text()
    assert '<td class="n">21.14%</td><td class="n"><b>21.15%</b></td><td class="n">+0.0 points</td>' in page
    assert '<td class="n">+1.14</td><td class="n">+1.15</td><td class="n">+0.0</td>' in page
    assert '<th class="n"><bdi>drop</bdi> - <bdi>plain</bdi></th>' in page
    for words in ("<bdi>plain, training</bdi>", "<bdi>drop, held-out (dots)</bdi>"):
        assert words in page
    level = "<bdi>unigram</bdi> <b>6.500</b>"
    assert page.count(level) == 1
    data = {"evaluation": values, "unigram_loss": 6.4}
    (tmp_path / "drop/report_data.json").write_text(json.dumps(data))
    page = bert_jax.report(tmp_path / "plain", tmp_path / "drop", output=tmp_path / "both.html").read_text()
    assert "<bdi>unigram</bdi>" not in page


def test_runs_with_one_evaluation_are_compared_in_training(tmp_path):
    page = runs_with_losses(tmp_path, (4.0, 3.0), (4.5, 4.5), "train")
    assert "masked-token loss in training (<bdi>b</bdi> minus <bdi>a</bdi>) grew: +0.5 at step 10, +1.5" in page
    assert "difference in masked-token loss" not in runs_with_losses(tmp_path / "one", (4.0,), (4.5,))


def test_a_comparison_names_few_options_and_the_parts_of_the_duration(tmp_path):
    log = """2026-01-01 10:00:00  1,234 parameters, 1 x cpu, mesh data=1, float32
2026-01-01 10:00:20  start-up 8.0 s, data 2.0 s, compiling the training step 20.0 s
2026-01-01 10:02:00  step 20/40  loss 2
"""
    folders = []
    for name in "ab":
        folder = write_run(tmp_path / name, config=f"training: {{num_steps: 40, seed: {ord(name)}}}\n")
        rows = [{"step": step, "seconds_per_step": 2.0, "tokens_per_second": 7.0} for step in (10, 20)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "train.log").write_text(log)
        (folder / "report_data.json").write_text("{}")
        folders.append(folder)
    page = bert_jax.report(*folders, output=tmp_path / "both.html").read_text()
    assert (
        "Only this option differs: training.seed (<bdi>a</bdi>: <bdi>97</bdi>, <bdi>b</bdi>: <bdi>98</bdi>)."
        in page
    )
    assert "Both runs are complete and end at step 20." in page
    # 10 s before the log begins, and 2 minutes.
    times = {"duration": "0:02:10", "... start-up and compilation": "0:00:30", "... training steps": "0:00:40",
             "... evaluation, saving and the rest": "0:01:00"}  # fmt: skip
    for part, duration in times.items():
        assert f"{part}</th><td>{duration}</td><td>{duration}</td>" in page
    (folders[1] / "config.yaml").write_text("a: 1\nb: 2\nc: 3\n")
    assert "5 options differ (below)." in bert_jax.report(*folders, output=tmp_path / "both.html").read_text()


def test_filled_masks_of_equal_texts_stand_side_by_side(tmp_path):
    for name, texts in (("a", "xy"), ("b", "xy"), ("c", "xz")):
        folder = write_run(tmp_path / name)
        masks = [
            {"text": f"{text} [MASK]", "masks": [{"predictions": [(name, 0.5)], "answer": text}]} for text in texts
        ]
        (folder / "report_data.json").write_text(json.dumps({"filled_masks": masks}))
    for other, order in (("b", "xxyy"), ("c", "xyxz")):
        page = bert_jax.report(tmp_path / "a", tmp_path / other, output=tmp_path / "both.html").read_text()
        assert re.findall(r'<div dir="auto">(\w) <span class="mask">', page) == [*order]
        assert page.count("The best guess is filled in") == 1
