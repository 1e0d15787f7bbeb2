"""The report of a run in progress, of older runs, and of hostile texts."""

import base64
import fcntl
import hashlib
import json
import os
import re
import time

import jax
import numpy as np
import pytest
from report_runs import LOG, RELOAD, TASK, Tags, page_of, steps_log, without_spans, write_run
from run_logs import open_log, train_metrics
from support import tiny_config, train_synthetic

import bert_jax
from bert_jax.commands import main as cli
from bert_jax.io.storage import location
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.training.logging.page import STYLE
from bert_jax.training.logging.progress import format_age
from bert_jax.training.logging.report import run_page, write_report
from bert_jax.training.logging.run_files import has_report, read_log, read_run

HOSTILE = ['"><script>alert(1)</script>', "</div></body><img src=x onerror=alert(1)>", "שלום {0} %s &amp;"]


def test_a_run_in_progress_writes_its_page_at_every_evaluation(tmp_path):
    (tmp_path / "config.yaml").write_text("training: {num_steps: 70}")
    log = open_log(tmp_path)
    log.begin_report()
    assert RELOAD in page_of(tmp_path) and "no metrics yet" in page_of(tmp_path)
    log.write(10, train_metrics(10) | {"seconds_per_step": 1.0})
    assert "no metrics yet" in page_of(tmp_path)  # not written at every line
    log.write(10, {"split": "eval", "loss": 9.125})
    assert "<b>9.125</b>" in page_of(tmp_path) and "in progress" in page_of(tmp_path)
    assert "step 10 of 70" in page_of(tmp_path) and "about 0:01:00 left" in page_of(tmp_path)
    assert not has_report(tmp_path)
    log.close()
    assert RELOAD not in page_of(tmp_path) and '<span class="state stopped">' in page_of(tmp_path)
    assert not has_report(tmp_path)


@pytest.mark.slow
def test_the_page_of_a_whole_run_ends_without_a_reload(tmp_path):
    pages = []
    config = tiny_config("--training.num_steps 4 --training.eval_interval 2 --training.log_interval 1")
    train_synthetic(config, tmp_path / "w", callbacks=(lambda row: pages.append(page_of(tmp_path / "w")),))
    assert all(RELOAD in page for page in pages) and len(set(pages)) >= 3
    # The first evaluation already knows the loss of the unigram distribution.
    level = f"<bdi>unigram</bdi> <b>{np.log(211):.3f}</b>"
    assert level not in pages[0] and all(level in page for page in pages[-2:])
    assert RELOAD not in page_of(tmp_path / "w") and "Filled masks" in page_of(tmp_path / "w")
    assert has_report(tmp_path / "w")
    # A continued run is not complete before its end.
    config = tiny_config("--training.num_steps 6 --training.eval_interval 2 --training.log_interval 1")
    complete = []
    train_synthetic(config, tmp_path / "w", callbacks=(lambda row: complete.append(has_report(tmp_path / "w")),))
    assert complete and not any(complete) and has_report(tmp_path / "w")


def test_a_page_that_takes_long_is_not_written_at_every_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_jax.training.logging.report._LONG", -1.0)
    log = open_log(tmp_path)
    log.begin_report()
    log._live._seconds = 60.0
    log.write(10, {"split": "eval", "loss": 9.125})
    assert "9.125" not in page_of(tmp_path)
    log.close()
    assert "9.125" in page_of(tmp_path)


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    log = open_log(tmp_path)
    log.begin_report()
    for step in (10, 20):
        log.write(step, {"split": "eval", "loss": 1.0})
    log.close()
    assert capsys.readouterr().out.count("WARNING: report.html: ") == 1


def test_the_page_is_tried_again_after_an_error(tmp_path, capsys):
    log = open_log(tmp_path)
    log.begin_report()

    def fails():
        raise KeyError("label")

    log.write(10, {"split": "dev", "f1": 0.5}, shows=True)
    log.show(fails)
    log.write(20, {"split": "dev", "f1": 0.625}, shows=True)
    log.show(lambda: {"title": "found"})
    assert capsys.readouterr().out.count("WARNING: report.html: ") == 1
    assert "62.5%" in page_of(tmp_path) and "<h1><bdi>found" in page_of(tmp_path)
    log.close()


def test_an_evaluation_writes_one_page_with_what_it_found(tmp_path):
    log = open_log(tmp_path)
    log.begin_report()
    pages = []
    for split in ("dev", "other"):
        log.write(10, {"split": split, "f1": 0.125}, shows=True)
        pages.append(page_of(tmp_path))
    log.show(lambda: {"title": "found"})
    assert not any("12.5%" in page for page in pages) and "12.5%" in page_of(tmp_path)
    # The last page of a run shows what an evaluation found since the page before.
    log._live._seconds = 60.0
    log.show(lambda: {"title": "found later"})
    assert "found later" not in page_of(tmp_path)
    log.close()
    assert "found later" in page_of(tmp_path)


def test_a_deleted_workdir_stays_deleted(tmp_path):
    log = open_log(tmp_path / "w")
    log.begin_report()
    for path in (tmp_path / "w").iterdir():
        path.unlink()
    (tmp_path / "w").rmdir()
    log.write(10, {"split": "eval", "loss": 1.0})
    log.close()
    assert not (tmp_path / "w").exists()


def test_the_log_tells_model_hardware_and_duration(tmp_path):
    facts = read_log(LOG)
    assert (facts.parameters, facts.devices, facts.dtype) == (1_234_567, "4 x v5e", "bfloat16")
    assert (facts.seconds, facts.attempts) == (60 + 10 + 30, 2)
    assert (facts.began, facts.first_time) == ("2026-01-01 09:59:50", "2026-01-01 10:00:00")
    folder = write_run(tmp_path / "w")
    assert "random parameters" in run_page(read_run(folder), TASK)
    (folder / "warm_start.yaml").touch()
    (folder / "train.log").write_text(LOG)
    page = without_spans(run_page(read_run(folder), TASK))
    for words in ("models/&lt;small&gt;", "1.23M", "4 x v5e", "0:01:40 in 2 starts", "160 training examples"):
        assert words in page
    assert '<div class="warning"><bdi>WARNING: &lt;img' in page


def test_a_running_run_is_one_whose_workdir_is_locked(tmp_path):
    folder = write_run(tmp_path / "w")
    assert read_run(folder).state == "stopped"
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
        (folder / "report_data.json").write_text('{"title": "x"}')  # as a run of an older version leaves it
        assert read_run(folder).state == "complete"
    assert read_run(folder).state == "complete" and read_run(folder).title == "x"


@pytest.mark.parametrize("name", ["config.yaml", "report_data.json", "metrics.json", "metrics.jsonl", "train.log"])
def test_damaged_files_count_as_empty(tmp_path, name):
    folder = write_run(tmp_path / "w")
    (folder / "report_data.json").write_text("{}")
    for content in (b"\xff{[:\n- x: [", b"day: 2026-02-31"):
        (folder / name).write_bytes(content)
        Tags(run_page(read_run(folder), TASK))


def test_texts_and_numbers_that_no_file_or_chart_can_hold(tmp_path):
    mistakes = [{"text": "half \ud83d of a pair", "gold": "a", "predicted": "b", "score": float("nan")}]
    values = [(1.0, 2.0), (3.0, float("nan")), (float("inf"), 1.0), (1e308, -1e308)]
    points = {"title": "points", "x": "x", "y": "y", "values": values}
    findings = {"dev": {"scored": 1, "wrong": 1, "mistakes": mistakes, "points": points}}
    folder = write_run(tmp_path / "w", config="task: {kind: regression}\n")
    write_report(folder, TASK, {"findings": findings}, name="caf\udce9")
    page = page_of(folder)
    assert "caf\ufffd" in page and "half \ufffd of a pair" in page and page.count("<title>x ") == 1
    write_report(folder, TASK, {"findings": {"dev": {"points": {**points, "values": values[1:]}}}})
    assert "dev: points" not in page_of(folder)


def test_entries_of_results_without_metrics_are_left_out(tmp_path):
    folder = write_run(tmp_path / "w", config="task: {kind: regression}\n", split="dev")
    (folder / "report_data.json").write_text("{}")
    for results in ([1], [{"split": "dev"}], [[]], [None]):
        (folder / "metrics.json").write_text(json.dumps(results))
        assert "<b>25.0%</b>" in run_page(read_run(folder), TASK)


def test_options_of_other_types_are_shown_as_they_are(tmp_path):
    config = "model: {num_layers: two, intermediate_size: [x], vocab_size: null}\ndata: {seq_length: long}\n"
    folder = write_run(
        tmp_path / "w", config=f"{config}optimizer: {{name: adam, learning_rate: fast}}\ntraining: 3\n"
    )
    page = run_page(read_run(folder), TASK)
    for words in ("two layers", "at most long tokens", "learning rate fast"):
        assert words in page


def test_texts_of_the_user_are_escaped(tmp_path):
    markup, closing, hebrew = HOSTILE
    config = {"task": {"kind": markup}, "data": {"train": [closing]}, "training": {"num_steps": 20}}
    folder = write_run(tmp_path / "<b>&", config=json.dumps(config), split=markup)
    (folder / "train.log").write_text(f"2026-01-01 10:00:00  WARNING: {closing}\n2026-01-01 10:00:00  {markup}\n")
    entry = {"metrics": {f"f1/{text}": {"value": 0.5, "ci95": None} for text in HOSTILE}, "n": 3, "split": closing}
    entry["baseline"] = {"answer": closing, "metric": f"f1/{markup}", "value": 0.1, "is_beaten": True}
    (folder / "metrics.json").write_text(json.dumps([entry]))
    mistake = {"text": markup, "text_pair": closing, "gold": hebrew, "predicted": markup, "score": 0.75}
    words = {"words": [(hebrew, closing, markup)]}
    counts = {"title": markup, "groups": [closing, "b"], "series": {markup: [1, 2], "other": [2, 1]}}
    points = {"title": markup, "x": closing, "y": markup, "values": [(0.0, 1.0), (1.0, 2.0)]}
    found = {"scored": 3, "wrong": 2, "mistakes": [mistake, words], "counts": counts, "points": points}
    data = {
        "summary": HOSTILE, "title": closing, "findings": {markup: found},
        "confusion": {closing: {"labels": HOSTILE, "counts": [[1, 2, 3]] * 3}},
    }  # fmt: skip
    write_report(folder, TASK, data)
    other = write_run(tmp_path / "other", split=closing)
    pages = page_of(folder), bert_jax.report(folder, other, output=tmp_path / "both.html").read_text()
    for page in pages:
        tags = Tags(page)
        assert not tags.tags & {"script", "img"} and not any(name.startswith("on") for name in tags.names)
        assert "<bdi>&lt;/div&gt;" in page and "default-src 'none'" in page
    assert f'<div class="text" dir="auto">{"&quot;&gt;&lt;script&gt;"}' in pages[0] and "75% sure" in pages[0]
    assert "<bdi>שלום {0} %s &amp;amp;</bdi>" in pages[0]


def test_scores_come_first_with_what_they_are_compared_with(tmp_path):
    folder = write_run(tmp_path / "w", config="task: {kind: tagging}\ntraining: {num_steps: 20}\n", split="dev")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "split": "dev", "f1": 0.0625}\n')
    metrics = {"f1": {"value": 0.5, "ci95": [0.4, 0.6]}, "f1/PER": {"value": 0.75, "ci95": None}}
    entry = {"split": "dev", "n": 7, "metrics": metrics, "chosen_by": {"metric": "f1"}}
    entry["baseline"] = {"answer": "tag O for all", "metric": "f1", "value": 0.125}
    (folder / "metrics.json").write_text(json.dumps([entry]))
    page = write_report(folder, TASK, {"evaluation": {"f1": 0.5}}).read_text()
    assert page.index("<b>50.0%</b><span>dev: f1</span><span>12.5% tag O for all</span>") < page.index("Charts")
    assert "<small>40.0% to 60.0%</small>" in page and "PER" in page
    assert '<td class="n">6.2%' in page  # before training
    assert '<span class="key dashed" style="--c:var(--base)"><bdi>tag O for all</bdi>' in page  # in the curve


def test_no_curve_twice_and_no_tile_alone(tmp_path):
    rows = [{"step": n, "loss": 3.0 / n, "mlm_loss": 3.001 / n, "tokens_per_second": 8.0} for n in range(1, 5)]
    folder = write_run(tmp_path / "w")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = run_page(read_run(folder), TASK)
    assert page.count("<svg") == 2 and "<h3>loss</h3>" not in page  # masked-token loss, tokens per second
    (folder / "train.log").write_text(LOG)
    assert run_page(read_run(folder), TASK).count('class="tile"') == 2  # of three


def test_the_page_of_a_run_in_progress_tells_the_age_of_its_last_line(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / "train.log").write_text(steps_log(5, 20) + steps_log(1, 0, "2026-01-01 10:05:00"))
    os.utime(folder / "train.log", (1_700_000_000, 1_700_000_000.25))
    page = run_page(read_run(folder, "running"), TASK)
    Tags(page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"; script-src 'sha256-{digest}'\">" in page
    last = re.search(
        r"last line (\S+ \S+ \S+)<span data-last=.1700000000.2.></span> · page written (\S+ \S+ \S+);", page
    )
    assert last[1] == time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(1_700_000_000))
    assert last[1].rsplit(" ", 1)[1] == last[2].rsplit(" ", 1)[1] == time.strftime("%Z")
    # Ten intervals of 60 s, of which one has 220 s, and a minute until the next page.
    assert '<div class="warning" data-limit="660" hidden>' in page
    assert "usually there is one every 60 s" in page and f"<code>bert-jax report {folder}</code>" in page
    # A rare line is not a sign of trouble.
    (folder / "train.log").write_text(steps_log(30, 1) + steps_log(1, 0, "2026-01-01 10:20:29"))
    assert '<div class="warning" data-limit="2460" hidden>' in run_page(read_run(folder, "running"), TASK)
    for state in ("stopped", "complete"):
        page = run_page(read_run(folder, state), TASK)
        assert "<script" not in page and "script-src" not in page and "data-l" not in page
    (folder / "train.log").write_text(steps_log(2, 20))  # too few lines
    page = run_page(read_run(folder, "running"), TASK)
    assert "data-last" in page and '<div class="warning" data-limit' not in page
    store = read_run(folder, "running", place=location("memory://bucket/run"))  # which gets lines from time to time
    assert '<div class="warning" data-limit' not in run_page(store, TASK)


def test_the_command_says_how_old_the_last_line_is(tmp_path, capsys):
    folder = write_run(tmp_path / "w")
    (folder / "train.log").write_text(steps_log(9, 20))
    assert cli.main(["report", str(folder)]) == 0
    found = capsys.readouterr()
    assert found.out == f"{folder / 'report.html'}\n"
    assert found.err == f"{folder}: stopped, not complete, step 20 of 40; last line 2026-01-01 10:02:40\n"
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for age, words in ((45, "45 s ago\n"), (720, "12 minutes ago, usually one every 20 s: the run may hang\n")):
            os.utime(folder / "train.log", (time.time() - age,) * 2)
            cli.main(["report", str(folder)])
            assert capsys.readouterr().err == f"{folder}: in progress, step 20 of 40; last line {words}"


def test_ages_in_words():
    ages = {0: "0 s", 99: "99 s", 100: "2 minutes", 5999: "100 minutes", 6000: "2 hours", 172_800: "2 days"}
    assert {age: format_age(age) for age in ages} == ages


def test_the_command_writes_into_the_workdir_and_refuses_other_folders(tmp_path, capsys):
    folder = write_run(tmp_path / "w")
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "stopped" in page_of(folder) and not has_report(folder)
    assert cli.main(["report", str(folder), str(tmp_path)]) == 2
    assert "no config.yaml in this folder; give the workdir of a run" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"a list is not allowed; write report\(\*workdirs\)"):
        bert_jax.report([folder])  # type: ignore[arg-type]


def test_the_command_leaves_the_file_that_a_run_is_writing(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / ".report.html.tmp").write_text("half a page")
    assert bert_jax.report(folder) == folder / "report.html" and "stopped" in page_of(folder)
    assert (folder / ".report.html.tmp").read_text() == "half a page"
    assert not [one for one in folder.iterdir() if one.name.startswith(".bert_jax-")]
    link = tmp_path / "link.html"
    link.symlink_to(folder / "linked.html")
    assert bert_jax.report(folder, output=link) == link and link.is_symlink()
    assert bert_jax.report(folder, output=tmp_path / "new" / "x.html").read_text() == page_of(folder)


def test_no_text_is_smaller_than_11_pixels():
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", STYLE)]
    assert len(sizes) > 5 and min(sizes) >= 11


def test_rates_are_means_over_the_run(tmp_path):
    folder = write_run(tmp_path / "w")
    rows = [(10, 1.0, 100.0), (20, 3.0, 20.0)]
    keys = ("step", "seconds_per_step", "tokens_per_second")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "train.log").write_text(LOG)
    assert "<b>40.0</b><span>tokens per second, mean</span>" in run_page(read_run(folder), TASK).replace(
        ">40<", ">40.0<"
    )


def test_the_page_of_a_run_in_a_store_names_the_store_and_its_checkpoints(tmp_path):
    place = location("memory://bucket/live/run")
    for file in ("5/commit_success.txt", "10/params"):
        (place / "checkpoints" / file).write_text("x")
    (tmp_path / "config.yaml").write_text("training: {num_steps: 40}\n")
    log = open_log(tmp_path, place=place)
    log.begin_report()
    log.close()
    page = page_of(tmp_path)
    assert "<bdi>run</bdi>" in page and "The newest checkpoint is of step 5;" in page
    assert "--config memory://bucket/live/run/config.yaml" in without_spans(page) and str(tmp_path) not in page


def test_a_full_disk_does_not_hide_why_a_run_ends(tmp_path, monkeypatch):
    log = open_log(tmp_path)

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._progress, "_write_log", full)
    log.write_end("preempted")
    with pytest.raises(OSError, match="No space"):
        log.line("other lines")


def test_an_error_in_the_last_report_does_not_prevent_the_end_of_a_run(tmp_path, monkeypatch, caplog):
    def fails(*arguments):
        raise KeyError("label")

    for name in ("run_page", "draw_curves"):
        monkeypatch.setattr(f"bert_jax.training.logging.report.{name}", fails)
    folder = write_run(tmp_path / "w")
    write_report(folder, TASK, {})
    assert has_report(folder) and "An error prevented this report" in page_of(folder)
    warned = [one.getMessage() for one in caplog.records]
    assert len(warned) == 2 and warned[1].startswith("WARNING: report.html: KeyError: 'label'; the other results")


def test_the_log_records_host_and_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/x/bert-jax", "finetune", "--data.train", "a b.csv"])
    log = open_log(tmp_path)
    log.write_origin()
    monkeypatch.setattr("sys.argv", ["mine.py", "secret"])
    log.write_origin()
    log.close()
    assert "CPUs" not in capsys.readouterr().out
    facts = read_log((tmp_path / "train.log").read_text())
    assert "CPUs" in facts.place and not facts.lines
    assert facts.versions == f"jax {jax.__version__}, bert_jax {bert_jax.__version__}"
    assert facts.command == "bert-jax finetune --data.train 'a b.csv'"
    (tmp_path / "config.yaml").write_text("task: {kind: qa}\ntraining: {seed: 7}\n")
    page = without_spans(run_page(read_run(tmp_path), TASK))
    assert "<pre>bert-jax finetune --data.train &#x27;a b.csv&#x27;</pre>" in page
    for words in (f"<dd><bdi>{tmp_path}</bdi>", "<dt>seed</dt><dd>7", "<dt>started</dt>", "<dt>runs on</dt>",
                  f"<dt>versions</dt><dd>{facts.versions}"):  # fmt: skip
        assert words in page


def test_a_run_in_progress_shows_the_baseline_of_its_evaluations(tmp_path):
    folder = write_run(tmp_path / "w")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "split": "eval", "mlm_loss": 4.0, "unigram_cross_entropy": 6.5}\n')
    page = run_page(read_run(folder, "running"), MaskedLm.display)
    assert "Held-out masked-token loss: 4, 2.5 better than 6.500 by word frequencies" in page.replace(
        "2.500", "2.5"
    )
    assert "<bdi>unigram</bdi> <b>6.500</b>" in page
