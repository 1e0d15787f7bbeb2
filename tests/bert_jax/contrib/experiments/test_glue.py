"""Files for GLUE's leaderboard, made of predictions as runs leave them."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from bert_jax.commands import main as cli
from bert_jax.config import dump_yaml, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.experiments.submission import FILES, write_submission
from data_pipeline.tasks import split_names

RECIPES = Path(__file__).resolve().parents[4] / "configs" / "finetune"
# The official test sets.
COUNTS = {
    "CoLA": 1_063, "SST-2": 1_821, "MRPC": 1_725, "STS-B": 1_379, "MNLI-m": 9_796, "MNLI-mm": 9_847, "AX": 1_104,
    "QNLI": 5_463, "QQP": 390_965, "RTE": 3_000, "WNLI": 146,
}  # fmt: skip
THREE, TWO = {"entailment", "neutral", "contradiction"}, {"entailment", "not_entailment"}
CLASSES = {"MNLI-m": THREE, "MNLI-mm": THREE, "AX": THREE, "QNLI": TWO, "RTE": TWO, "STS-B": set()}


def config_of(task):
    return load_config(FinetuneConfig, ["--config", str(RECIPES / f"{task}.yaml"), "--data.dir", "glue"])


def predictions(config, count, first=0):
    """Lines of a split: the classes of the recipe in turn, or values around STS-B's range."""
    labels = [json.dumps(label) for label in config.data.labels] or [
        "-0.25",
        "0.0",
        "2.5000004",
        "5",
        "5.2",
        "1e-7",
    ]
    name = "label" if config.data.labels else "value"
    return [f'{{"id": "{i}", "{name}": {labels[i % len(labels)]}}}' for i in range(first, first + count)]


def write_run(folder, task, edit=lambda lines: lines, splits=None):
    """A finished run of a recipe that has predicted its test sets; ``edit`` changes the lines of each split."""
    config = config_of(task)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    for split, file in FILES[task].items():
        if splits is None or split in splits:
            lines = edit(predictions(config, COUNTS[file.name]))
            (folder / f"predictions_{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of every task; QQP's predictions stand in the reverse order."""
    folder = tmp_path_factory.mktemp("runs")
    edits = {"qqp": lambda lines: lines[::-1]}
    return {task: write_run(folder / task, task, edits.get(task, lambda lines: lines)) for task in FILES}


def rows(path):
    head, *found = (line.split("\t") for line in path.read_text().removesuffix("\n").split("\n"))
    assert head == ["index", "prediction"] and all(len(row) == 2 for row in found)
    return found


@pytest.mark.slow
def test_all_eleven_files(runs, tmp_path, capsys):
    assert cli.main(["submission", *map(str, runs.values()), "--output", str(tmp_path / "glue")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"{tmp_path}/glue/QQP.tsv: 390,965 predictions" in said
    assert said[-1] == f"{tmp_path}/glue/submission.zip: 11 of 11 files"
    names = {path.name for path in (tmp_path / "glue").iterdir()}
    assert names == {f"{name}.tsv" for name in COUNTS} | {"submission.zip"}
    for name, count in COUNTS.items():
        found = rows(tmp_path / "glue" / f"{name}.tsv")
        assert [index for index, _ in found] == list(map(str, range(count))), name
        if name != "STS-B":
            assert {prediction for _, prediction in found} == CLASSES.get(name, {"0", "1"}), name
    # In the order of the indices, whatever that of the predictions is.
    assert [answer for _, answer in rows(tmp_path / "glue" / "QQP.tsv")[:3]] == ["0", "1", "0"]
    values = [answer for _, answer in rows(tmp_path / "glue" / "STS-B.tsv")[:6]]
    assert values == ["0.000000", "0.000000", "2.500000", "5.000000", "5.000000", "0.000000"]
    with zipfile.ZipFile(tmp_path / "glue" / "submission.zip") as archive:
        assert archive.testzip() is None and set(archive.namelist()) == {f"{name}.tsv" for name in COUNTS}
        assert archive.read("MNLI-mm.tsv") == (tmp_path / "glue" / "MNLI-mm.tsv").read_bytes()


def test_the_splits_are_those_of_the_recipes():
    """With the test files that their headers name."""
    for task, files in FILES.items():
        data = config_of(task).data
        data = dataclasses.replace(data, test=data.test or ("test.tsv",))
        assert set(split_names(data)[1]) == set(files), task


def test_what_is_missing_is_named_and_the_rest_is_written(runs, tmp_path):
    without = shutil.copytree(runs["mnli"], tmp_path / "mnli")
    (without / "predictions_test_mismatched.jsonl").unlink()
    said = write_submission([without, runs["rte"]], tmp_path / "out")
    assert said[-1] == (
        f"{tmp_path}/out/submission.zip: 3 of 11 files, not ready to upload: the leaderboard also requires CoLA, "
        "SST-2, MRPC, STS-B, MNLI-mm, QNLI, QQP, WNLI"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "AX.tsv", "MNLI-m.tsv", "RTE.tsv", "submission.zip",
    ]  # fmt: skip


def changed(number, **fields):
    """An edit of one line."""

    def edit(lines):
        return [*lines[:number], json.dumps(json.loads(lines[number]) | fields), *lines[number + 1 :]]

    return edit


@pytest.mark.parametrize(
    ("task", "edit", "message"),
    [
        (
            "wnli",
            lambda lines: lines[:-1],
            "145 predictions of test, but WNLI has 146: index 145 is missing",
        ),
        (
            "wnli",
            lambda lines: lines[:7] + lines[8:],
            "145 predictions of test, but WNLI has 146: index 7 is missing",
        ),
        (
            "wnli",
            lambda lines: [*lines, lines[3]],
            "test.jsonl:147: index '3' occurs twice in WNLI; the GLUE",
        ),
        (
            "wnli",
            changed(5, id="146"),
            "test.jsonl:6: index '146' is not allowed in WNLI; the GLUE test file has the indices 0 to 145",
        ),
        ("wnli", changed(5, id="05"), "test.jsonl:6: index '05' is not allowed in WNLI"),
        ("wnli", changed(5, id=5), "test.jsonl:6: index 5 is not allowed in WNLI"),
        (
            "wnli",
            changed(5, label="2"),
            ":6: prediction '2' is not a class of WNLI; allowed: 0, 1",
        ),
        ("wnli", changed(5, label=1), ":6: prediction 1 is not a class of WNLI"),
        ("wnli", changed(5, label=["1"]), r":6: prediction \['1'\] is not a class of WNLI"),
        (
            "rte",
            changed(5, label="neutral"),
            "'neutral' is not a class of RTE; allowed: entailment, not_entailment",
        ),
        ("stsb", changed(5, value=float("nan")), ":6: prediction nan of STS-B"),
        ("stsb", changed(5, value=True), ":6: prediction True of STS-B"),
        ("stsb", changed(5, value="4.1"), ":6: prediction '4.1' of STS-B"),
        ("wnli", lambda lines: [*lines[:-1], "{"], "test.jsonl:146: not JSON"),
    ],
)
def test_predictions_that_the_leaderboard_would_not_take(tmp_path, task, edit, message):
    run = write_run(tmp_path / "run", task, edit)
    with pytest.raises(ValueError, match=message) as raised:
        write_submission([run], tmp_path / "out")
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_runs_that_have_nothing_for_the_leaderboard(runs, tmp_path, capsys):
    not_glue = shutil.copytree(runs["wnli"], tmp_path / "sick")
    config = load_config(FinetuneConfig, ["--task.name", "sick"])
    (not_glue / "config.yaml").write_text(dump_yaml(config))
    for given, message in (
        ([not_glue], "task.name 'sick' is not a GLUE task; allowed: cola, sst2, mrpc"),
        ([tmp_path], f"{tmp_path}: no config.yaml"),
        ([write_run(tmp_path / "a", "wnli", splits=())], "splits with predictions: none, the run is not finished"),
        ([write_run(tmp_path / "b", "mnli", splits=())], "predictions_test_matched.jsonl: "),
        ([runs["wnli"], runs["wnli"]], f"{runs['wnli']} already provides WNLI.tsv; "),
    ):
        assert cli.main(["submission", *map(str, given), "--output", str(tmp_path / "out")]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1 and message in captured.err
    assert not (tmp_path / "out").exists()
