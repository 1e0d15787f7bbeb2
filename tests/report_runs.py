"""Workdirs of runs, written without training, for the tests of reports."""

import datetime
import json
from html.parser import HTMLParser

from bert_jax.finetuning.supervision import LABELS_ONLY
from bert_jax.finetuning.task_objective import task_display
from bert_jax.training.logging.report import run_page
from bert_jax.training.logging.run_files import read_run

RELOAD = '<meta http-equiv="refresh" content="20">'
TASK = task_display(LABELS_ONLY)
LOG = """2026-01-01 10:00:00  starts from models/<small>
2026-01-01 10:00:00  1,234,567 parameters, 4 x v5e, mesh data=4xfsdp=1xtensor=1, bfloat16
2026-01-01 10:00:05  start-up 8.0 s, data 2.0 s, compiling the training step 5.0 s
2026-01-01 10:01:00  step 10/40  loss 5.123
2026-01-01 11:59:59  continuing at step 10
2026-01-01 12:00:00  1,234,567 parameters, 4 x v5e, mesh data=4xfsdp=1xtensor=1, bfloat16
2026-01-01 12:00:30  WARNING: <img src=x> is near
"""


class Tags(HTMLParser):
    """The tags and the attributes of a page, which must be closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.names = [], set(), set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names.update(name for name, _ in attrs)
        self.open += [] if tag in ("meta", "br", "wbr") else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def without_spans(page):
    """The page without the marks of places at which a line may be broken."""
    return page.replace("<span>", "").replace("</span>", "").replace("<wbr>", "")


def page_of(folder):
    return (folder / "report.html").read_text()


def write_run(folder, values=(3.0, 2.0), config="training: {num_steps: 40}\n", split="eval"):
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    rows = [{"step": 10 * n, "loss": value, "epoch": 0.5, "examples_seen": 80} for n, value in enumerate(values, 1)]
    rows += [{"step": row["step"], "split": split, "loss": row["loss"] + 0.5, "f1": 0.25} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def steps_log(count, seconds, first="2026-01-01 10:00:00"):
    """Lines of train.log about steps, one every so many seconds."""
    began = datetime.datetime.fromisoformat(first)
    stamps = [began + datetime.timedelta(seconds=seconds * number) for number in range(count)]
    return "".join(f"{stamp}  step {10 * number}/400  loss 2.0\n" for number, stamp in enumerate(stamps, 1))


def task_run(folder, value, interval, answer=0.125, name="f1", **entry):
    write_run(folder, config="task: {kind: tagging}\n", split="dev")
    entry |= {"split": "dev", "n": 7, "metrics": {name: {"value": value, "ci95": interval}}}
    entry["baseline"] = {"answer": "tag O for all", "metric": name, "value": answer}
    (folder / "metrics.json").write_text(json.dumps([entry]))
    (folder / "report_data.json").write_text("{}")
    return run_page(read_run(folder), TASK)
