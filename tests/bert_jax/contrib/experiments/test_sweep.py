"""Sweeps: every run once, the same table whatever happened on the way, several processes, no mixing."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from finetune_cases import configured, run, saved_model

from bert_jax.commands import finetune
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config.loader import Setting, Settings, take_options
from bert_jax.contrib.experiments.cells import plan_cells
from bert_jax.contrib.experiments.sweep import run_sweep
from bert_jax.io.folder_lock import FolderTaken, hold_folder
from bert_jax.process import exits
from bert_jax.process.signals import StopRequest

SETTINGS = [Setting("command line", "data.dev", "dev.tsv"), Setting("command line", "training.seed", "4")]
GRID = "--sweep optimizer.learning_rate=1e-3,2e-3 training.global_batch_size=8,16 --seeds 2"
NAMES = [
    f"learning_rate={rate},global_batch_size={size},seed={seed}"
    for rate in ("0.001", "0.002") for size in (8, 16) for seed in (4, 5)
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_freed(monkeypatch):
    """What a real run leaves is freed after every run; after one that is made up it takes half a second."""
    monkeypatch.setattr("gc.collect", lambda: 0)
    monkeypatch.setattr("jax.clear_caches", lambda: None)


def planned(line, settings=SETTINGS):
    options, _ = take_options(FinetuneRunOptions, line.split())
    return plan_cells(options.sweep, options.seeds, settings)


class Trainer:
    """Makes the files of a finished run, but for the runs named in ``fails``, which raise."""

    def __init__(self, **fails):
        self.fails, self.made, self.settings = fails, [], []

    def __call__(self, folder, settings):
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name in self.fails:
            raise self.fails[folder.name]
        self.made.append(folder.name)
        self.settings.append(settings)
        place = NAMES.index(folder.name) if folder.name in NAMES else 0
        value = round(0.5 + place / 100, 6)
        entry = {
            "split": "dev",
            "chosen_by": {"metric": "accuracy", "higher_is_better": True},
            "metrics": {"accuracy": {"value": value, "ci95": None}, "mse": {"value": 1 - value, "ci95": None}},
        }
        (folder / "metrics.json").write_text(json.dumps([entry, {**entry, "split": "test"}]))
        (folder / "report.html").write_text("")
        (folder / "report_data.json").write_text("{}")
        (folder / "checkpoints").mkdir()


def swept(folder, train, line=GRID, settings=SETTINGS, **options):
    base, cells = planned(line, settings)
    options = {"init_from": "model", "stop": StopRequest(), "host_timeout": 10.0, **options}
    return run_sweep(base, cells, folder, train, **options)


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("sweep.md", "sweep.json", "sweep.png")}


def test_every_run_once_and_a_table_of_means(tmp_path):
    train = Trainer()
    assert swept(tmp_path, train) == exits.OK
    assert train.made == NAMES
    assert [(setting.key, setting.value) for setting in train.settings[3][-3:]] == [
        ("optimizer.learning_rate", "0.001"), ("training.global_batch_size", "16"), ("training.seed", "5"),
    ]  # fmt: skip
    assert train.settings[0][0].value == train.settings[7][0].value == str(tmp_path / "compilation_cache")
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert lines[0] == "| learning_rate | global_batch_size | seeds | dev accuracy | sd | best | test accuracy |"
    assert lines[2] == "| 0.001 | 8 | 2 | 0.5050 | 0.0071 | 0.5100 | 0.5050 |"
    assert lines[5] == "| 0.002 | 16 | 2 | **0.5650** | 0.0071 | 0.5700 | 0.5650 |"
    assert lines[-1].startswith(f"Best run: runs/{NAMES[-1]} (0.5700)")
    assert not any((tmp_path / "runs" / name / "checkpoints").exists() for name in NAMES)
    again = Trainer()
    before = files(tmp_path)
    assert swept(tmp_path, again) == exits.OK and not again.made and files(tmp_path) == before


def test_a_sweep_that_was_stopped_goes_on_and_gives_the_same_table(tmp_path):
    swept(tmp_path / "whole", Trainer())
    killed = Trainer(**{NAMES[3]: exits.Stop(exits.PREEMPTED, "stopped")})
    with pytest.raises(exits.Stop):
        swept(tmp_path / "parts", killed)
    assert killed.made == NAMES[:3]
    # Killed while it removed what it does not need any more.
    (tmp_path / "parts" / "runs" / NAMES[0] / "checkpoints").mkdir()
    rest = Trainer()
    swept(tmp_path / "parts", rest)
    assert rest.made == NAMES[3:] and files(tmp_path / "parts") == files(tmp_path / "whole")
    assert not (tmp_path / "parts" / "runs" / NAMES[0] / "checkpoints").exists()


def test_runs_of_another_process_are_left_to_it(tmp_path, capsys):
    train = Trainer()
    with hold_folder(tmp_path / "runs" / NAMES[1], "taken"):
        assert swept(tmp_path, train) == exits.OK
    assert train.made == [name for name in NAMES if name != NAMES[1]]
    assert "7 of 8 runs finished; another process executes 1 more" in capsys.readouterr().out


def test_processes_write_the_table_in_turn(tmp_path, monkeypatch):
    released = []
    with contextlib.ExitStack() as other:
        other.enter_context(hold_folder(tmp_path, "taken"))

        def sleep(_):
            released.append(len(list(tmp_path.glob("s*"))))
            other.close()

        monkeypatch.setattr("time.sleep", sleep)
        assert swept(tmp_path, Trainer()) == exits.OK
    assert released == [0]
    monkeypatch.setattr("time.sleep", lambda _: None)
    with hold_folder(tmp_path, "taken"), pytest.raises(FolderTaken, match="a run is using this workdir"):
        swept(tmp_path, Trainer())


def test_a_run_that_diverges_does_not_end_the_others(tmp_path, capsys):
    train = Trainer(**{NAMES[0]: exits.Stop(exits.NON_FINITE, "stopped: the loss is not finite")})
    assert swept(tmp_path, train) == exits.NON_FINITE
    assert train.made == NAMES[1:]
    assert "| 0.001 | 8 | 1 | 0.5100 | - | 0.5100 |" in (tmp_path / "sweep.md").read_text()


def test_a_metric_that_should_be_low(tmp_path):
    class Low(Trainer):
        def __call__(self, folder, settings):
            super().__call__(folder, settings)
            path = folder / "metrics.json"
            text = path.read_text().replace('"metric": "accuracy", "higher_is_better": true',
                                            '"metric": "mse", "higher_is_better": false')  # fmt: skip
            path.write_text(text)

    swept(tmp_path, Low())
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert "| **0.4350** | 0.0071 | 0.4300 |" in lines[5] and "(0.4300)" in lines[-1]


@pytest.mark.slow
def test_a_folder_holds_one_sweep_and_more_of_it(tmp_path):
    swept(tmp_path, Trainer())
    more = Trainer()
    swept(tmp_path, more, GRID.replace("--seeds 2", "--seeds 1"))
    assert not more.made  # fewer seeds: a part of what is there
    other = [*SETTINGS, Setting("command line", "optimizer.weight_decay", "0.1")]
    with pytest.raises(ValueError, match=r"runs with other settings \(optimizer.weight_decay: 0.01 -> 0.1\)"):
        swept(tmp_path, Trainer(), settings=other)
    # What was swept is shared by runs that do not sweep it, from then on.
    rates = [[*SETTINGS, Setting("command line", "optimizer.learning_rate", rate)] for rate in ("0.5", "0.9")]
    swept(tmp_path, Trainer(), "--sweep training.global_batch_size=4 --seeds 1", rates[0])
    with pytest.raises(ValueError, match=r"\(optimizer.learning_rate: 0.5 -> 0.9\)"):
        swept(tmp_path, Trainer(), "--sweep training.global_batch_size=4 --seeds 1", rates[1])
    with pytest.raises(ValueError, match="init_from: model -> elsewhere"):
        swept(tmp_path, Trainer(), init_from="elsewhere")


@pytest.mark.parametrize(
    ("line", "settings", "message"),
    [
        ("--seeds 0", SETTINGS, "seeds: 0 is not allowed"),
        ("--sweep learning_rate", SETTINGS, "'learning_rate' is not allowed; allowed: KEY=VALUE"),
        ("--sweep optimizer.rate=1", SETTINGS, "--sweep: optimizer.rate: unknown option"),
        ("--sweep optimizer.learning_rate=fast,2e-5", SETTINGS, "'fast' is not a number"),
        ("--sweep optimizer.learning_rate=1e-5,0.00001", SETTINGS, "every value once"),
        ("--sweep optimizer.learning_rate=1e-5,", SETTINGS, "allowed: KEY=VALUE,VALUE"),
        ("--sweep optimizer.warmup_tokens=0,5", SETTINGS, "warmup_tokens: an option of pretraining only"),
        ("--sweep training.seed=1,2", SETTINGS, "training.seed=1,2.* --seeds N"),
        ("--sweep training.min_delta=0.0", SETTINGS, "--sweep: training.min_delta: no longer an option; omit it"),
        ("--sweep optimizer.frozen=pooler", SETTINGS, "is a list"),
        ("--sweep task.max_length=4,8", SETTINGS, "--sweep: task.max_length: 4 is not allowed"),
        ("--sweep", SETTINGS[1:], "data.dev: empty"),
    ],
)
def test_what_is_not_allowed_is_refused_before_anything_runs(line, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(line, settings)


def test_without_values_it_is_the_grid_of_the_paper():
    base, cells = planned("--sweep")
    assert len(cells) == 24 and cells[0].name == "global_batch_size=16,learning_rate=5e-05,num_epochs=2.0,seed=4"
    assert len({cell.name for cell in cells}) == 24 and base.training.seed == 4
    _, seeds = planned("--seeds 5")
    assert [cell.name for cell in seeds] == [f"seed={n}" for n in range(4, 9)]


@pytest.mark.slow
def test_real_runs_give_the_same_table_to_the_byte(tmp_path):
    source = saved_model(tmp_path / "model")
    config, _ = configured(source, tmp_path / "none", "--data.dev dev.tsv")
    _, cells = plan_cells((), 2, [*SETTINGS, Setting("", "task.max_length", "32")])

    def train(folder, settings):
        words = Settings(flags=tuple(settings)).words()
        run(source, folder, f"--data.dev dev.tsv {' '.join(words)} --training.num_epochs 1")

    def sweep(folder):
        run_sweep(config, cells, folder, train, init_from="", stop=StopRequest(), host_timeout=10.0)

    sweep(tmp_path / "a")
    shutil.copytree(tmp_path / "a" / "runs" / "seed=4", tmp_path / "b" / "runs" / "seed=4")
    sweep(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    found = json.loads((tmp_path / "a" / "sweep.json").read_text())
    assert [one["seed"] for one in found] == [4, 5]
    first, second = (tmp_path / "a" / "runs" / f"seed={n}" / "predictions_dev.jsonl" for n in (4, 5))
    assert first.read_bytes() != second.read_bytes()
    assert (tmp_path / "a" / "runs" / "seed=5" / "best").is_dir()


def test_the_command_hands_every_run_its_settings(tmp_path, monkeypatch, handlers):
    source, calls = saved_model(tmp_path / "model"), []
    fake = Trainer()

    def train(options, settings, stop, started):
        assert not options.several and options.init_from == "model"
        calls.append(settings)
        fake(Path(options.workdir), settings)

    monkeypatch.setattr("bert_jax.contrib.experiments.config.train", train)
    monkeypatch.chdir(tmp_path)
    line = f"--init_from model --data.dev dev.tsv --task.max_length 32 --workdir {tmp_path / 'w'} {GRID}"
    monkeypatch.setattr("sys.argv", ["run_finetune.py", *line.split(), "--training.seed", "4"])
    assert finetune.main() == exits.OK
    assert fake.made == NAMES
    words = calls[7].words()
    assert words[:6] == ["--data.dev", "dev.tsv", "--task.max_length", "32", "--training.seed", "4"]
    assert words[-6:-2] == ["--optimizer.learning_rate", "0.002", "--training.global_batch_size", "16"]
    shared = json.loads((tmp_path / "w" / "shared.json").read_text())
    assert shared["model.hidden_size"] == 32 and shared["init_from"] == str(source)
    assert "optimizer.learning_rate" not in shared and "training.seed" not in shared
