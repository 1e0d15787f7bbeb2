"""Whole runs of a tiny model on synthetic batches: repeatable, resumable, guarded."""

import json
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
from builders import StopAt
from support import TINY, SyntheticIterator, SyntheticSource, objective_of, tiny_config, train_synthetic, untimed

from bert_jax.config import MeshConfig, PretrainConfig, RunOptions
from bert_jax.config.loader import build_config, read_settings
from bert_jax.io.folder_lock import hold_folder
from bert_jax.parallel import make_mesh
from bert_jax.process.exits import Stop
from bert_jax.start.plan import plan_start
from bert_jax.training.checkpoint import writer
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.run_files import read_data


def tiny(*words):
    """A config whose programs serve all tests here, whatever their numbers of steps."""
    return tiny_config("--optimizer.ema_decay 0.9 --optimizer.decay_steps 20", *words)


def final_state(workdir, config):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return restore_newest(
        workdir, config, mesh, objective_of(config, mesh).model, read_only=True, may_change=set(), report=print
    )


def assert_states_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)


@pytest.mark.slow
def test_same_run_twice_is_bitwise_equal(tmp_path):
    config = tiny()
    for name in ("a", "b"):
        train_synthetic(config, tmp_path / name)
    assert_states_equal(final_state(tmp_path / "a", config), final_state(tmp_path / "b", config))
    assert untimed(read_metrics(tmp_path / "a")) == untimed(read_metrics(tmp_path / "b"))


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path):
    train_synthetic(tiny(), tmp_path / "a")
    other = tiny("--training.seed 1")
    train_synthetic(other, tmp_path / "c")
    assert untimed(read_metrics(tmp_path / "a")) != untimed(read_metrics(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 42), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_rest_is_bitwise_the_same(tmp_path, number, code):
    config = tiny("--training.eval_interval 6")
    train_synthetic(config, tmp_path / "whole")
    with pytest.raises(Stop) as stop:
        # Step 7 lies between log lines (2) and checkpoints (5): partial sums must survive.
        train_synthetic(config, tmp_path / "cut", stop=StopAt(1 + 7 + 3, number))
    assert stop.value.code == code
    assert "run the same command to continue" in str(stop.value)
    assert saved_steps(tmp_path / "cut")[-1] == 7
    train_synthetic(config, tmp_path / "cut")
    assert_states_equal(final_state(tmp_path / "whole", config), final_state(tmp_path / "cut", config))
    assert untimed(read_metrics(tmp_path / "whole")) == untimed(read_metrics(tmp_path / "cut"))


def test_a_callback_ends_the_run_like_its_last_step_and_the_rest_is_bitwise_the_same(tmp_path):
    config, cut = tiny("--training.eval_interval 6"), tmp_path / "cut"
    train_synthetic(config, tmp_path / "whole")
    # The line of step 4 is written while step 5 is in flight.
    train_synthetic(config, cut, callbacks=(lambda row: row["step"] == 4 and "split" not in row,))
    rows = read_metrics(cut)
    assert saved_steps(cut) == [5] and (cut / "report.html").exists()
    assert [row["step"] for row in rows if row.get("split") == "eval"] == [5]
    train_synthetic(config, cut)
    assert_states_equal(final_state(tmp_path / "whole", config), final_state(cut, config))
    whole, both = (untimed(read_metrics(tmp_path / name)) for name in ("whole", "cut"))
    assert [row for row in both if "split" not in row] == [row for row in whole if "split" not in row]
    # The first and the last evaluation know the baselines; the report keeps the sums of groups of rows.
    evaluations = [row for row in whole if row.get("split") == "eval"]
    assert [(row["step"], "unigram_cross_entropy" in row) for row in evaluations] == [
        (6, True), (12, False), (18, False), (20, True),
    ]  # fmt: skip
    groups = read_data(tmp_path / "whole")["evaluation_groups"]
    sums, weights = np.array(groups["mlm_loss"]).T
    assert len(sums) == 3 and sums.sum() / weights.sum() == pytest.approx(evaluations[-1]["mlm_loss"], rel=1e-12)
    assert weights.sum() == evaluations[-1]["targets"] and "nsp_accuracy" in groups


@pytest.mark.parametrize("waits", ["poll", "save"])
def test_a_run_whose_workdir_disappears_while_a_save_is_written(tmp_path, monkeypatch, waits):
    """The failed save, or the end of the run after it, names the workdir, not one of its files."""
    config, workdir = tiny("--training.eval_interval 0 --training.checkpoint_interval 2"), tmp_path / "w"
    write, deleted, polled = writer._MetaHandler._write, threading.Event(), writer.CheckpointWriter.poll

    async def later(self, directory, complete):
        workdir.rename(tmp_path / "gone")
        deleted.set()
        await write(self, directory, complete)

    def poll(self):
        if waits == "poll" and self._unlisted is not None:
            deleted.wait()
            while self.is_writing():
                time.sleep(0.01)
        polled(self)

    monkeypatch.setattr(writer._MetaHandler, "_write", later)
    monkeypatch.setattr(writer.CheckpointWriter, "poll", poll)
    with pytest.raises(ValueError, match="w: deleted, moved or replaced during the run"):
        train_synthetic(config, workdir)


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", ["deleted", "emptied", "moved", "replaced"])
def test_a_run_whose_workdir_disappears_ends_at_the_next_save(tmp_path, fault):
    # Without an evaluation, which writes the report: it could meet the deletion of the folder.
    config, workdir = tiny("--training.eval_interval 0"), tmp_path / "w"

    class Batches(SyntheticIterator):
        def __next__(self):
            if self.data_step == 7 and fault == "moved":
                workdir.rename(tmp_path / "other")
            elif self.data_step == 7 and fault == "emptied":  # as by `rm -rf w/*`, which keeps .lock
                [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in workdir.glob("[!.]*")]
            elif self.data_step == 7:
                shutil.rmtree(workdir)
                if fault == "replaced":
                    workdir.mkdir()
                    (workdir / "metrics.jsonl").touch()
            return super().__next__()

    class Source(SyntheticSource):
        def train(self, rows):
            return Batches(self.config, rows)

    with pytest.raises(ValueError, match="w: deleted, moved or replaced during the run"):
        train_synthetic(config, workdir, source=Source(config))


def test_a_complete_run_says_so_and_changes_nothing(tmp_path, capsys):
    config = tiny("--training.num_steps 4")
    train_synthetic(config, tmp_path / "w")
    before = (tmp_path / "w" / "metrics.jsonl").read_bytes()
    warning = "WARNING: optimizer.warmup_steps: 4 is not less than the 4 steps of the schedule"
    assert warning in capsys.readouterr().out and warning in (tmp_path / "w" / "report.html").read_text()
    train_synthetic(config, tmp_path / "w")
    shown = capsys.readouterr().out
    assert "is complete: 4 steps" in shown and "WARNING" not in shown
    assert (tmp_path / "w" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_bad_step_changes_nothing_but_the_step(tmp_path):
    config = tiny("--training.num_steps 4", "--training.checkpoint_interval 1")
    source = SyntheticSource(config, poison=frozenset({2}))
    train_synthetic(config, tmp_path / "w", source=source)
    states = {}
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    from bert_jax.training.checkpoint import restore as checkpoint

    for step in (2, 3, 4):
        model = objective_of(config, mesh).model
        states[step] = checkpoint._verified(tmp_path / "w", step, config, mesh, model, set(), None, None).state
    jax.tree.map(np.testing.assert_array_equal, states[2].replace(step=0), states[3].replace(step=0))
    assert (states[2].step, states[3].step) == (2, 3)
    embedding = states[4].params["embeddings"]["word_embeddings"]["embedding"]
    assert not np.array_equal(embedding, states[3].params["embeddings"]["word_embeddings"]["embedding"])
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "w") if "split" not in line] == [0, 1]


def test_bad_steps_in_a_row_stop_with_code_44(tmp_path):
    config = tiny("--training.max_bad_steps 3")
    source = SyntheticSource(config, poison=frozenset({1, 5, 6, 7, 8, 9, 10}))
    with pytest.raises(Stop, match="3 steps in a row, up to step 8") as stop:
        train_synthetic(config, tmp_path / "w", source=source)
    assert stop.value.code == 44
    json.loads((tmp_path / "w" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_new_phase_carries_step_moments_and_average_and_leaves_the_first_alone(tmp_path):
    first = tiny("--training.num_steps 10 --optimizer.decay_steps 20")
    train_synthetic(first, tmp_path / "one")
    listing = {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}
    second = tiny(
        "--data.seq_length 32 --data.max_predictions 6 --training.global_batch_size 4",
        "--model.hidden_dropout 0.0 --training.checkpoint_interval 3",
    )
    with pytest.raises(Stop):
        train_synthetic(second, tmp_path / "two", continue_from=tmp_path / "one", stop=StopAt(0))
    assert saved_steps(tmp_path / "two") == []
    with pytest.raises(Stop):
        train_synthetic(second, tmp_path / "two", continue_from=tmp_path / "one", stop=StopAt(6))
    assert saved_steps(tmp_path / "two")[-1] == 15
    train_synthetic(second, tmp_path / "two", continue_from=tmp_path / "one")
    train_synthetic(second, tmp_path / "straight", continue_from=tmp_path / "one")
    assert_states_equal(final_state(tmp_path / "two", second), final_state(tmp_path / "straight", second))
    assert untimed(read_metrics(tmp_path / "two")) == untimed(read_metrics(tmp_path / "straight"))
    rates = [
        line["learning_rate"]
        for phase in ("one", "two")
        for line in read_metrics(tmp_path / phase)
        if "split" not in line
    ]
    assert len(rates) == 10 and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert listing == {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_state_at_the_border_of_phases_is_bitwise_the_old_one(tmp_path):
    first = tiny("--training.num_steps 6 --optimizer.decay_steps 20")
    train_synthetic(first, tmp_path / "one")
    second = tiny("--optimizer.ema_decay 0.9 --data.seq_length 32")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    carried = restore_newest(
        tmp_path / "one",
        second,
        mesh,
        objective_of(second, mesh).model,
        read_only=True,
        may_change=set(),
        report=print,
    )
    assert_states_equal(final_state(tmp_path / "one", first), carried)
    assert int(carried.state.step) == 6 and carried.state.opt_state is not None


@pytest.mark.slow
def test_resume_refuses_a_changed_model_and_shows_the_difference(tmp_path):
    train_synthetic(tiny("--training.num_steps 2"), tmp_path / "w")
    with pytest.raises(ValueError, match=r"model\.num_layers: 1 -> 2"):
        train_synthetic(tiny("--model.num_layers 2"), tmp_path / "w")
    with pytest.raises(ValueError, match=r"sentence-pair head\): \w+ -> \w+"):
        train_synthetic(tiny("--data.next_sentence none"), tmp_path / "w")
    assert saved_steps(tmp_path / "w") == [2]


@pytest.mark.slow
def test_resume_refuses_another_prng_unless_allowed(tmp_path, capsys):
    train_synthetic(tiny("--training.num_steps 2"), tmp_path / "w")
    other = tiny("--training.num_steps 4 --execution.prng rbg --execution.scan_layers true")
    with pytest.raises(ValueError, match="--allow_numeric_change"):
        train_synthetic(other, tmp_path / "w")
    train_synthetic(other, tmp_path / "w", allow_numeric_change=True)
    assert "changed since the checkpoint: execution.scan_layers: False -> True" in capsys.readouterr().out


def test_a_run_keeps_its_prng_unless_the_command_names_one(tmp_path):
    train_synthetic(tiny("--training.num_steps 2"), tmp_path / "w")
    stored = tmp_path / "w" / "config.yaml"
    stored.write_text(stored.read_text().replace("prng: hash", "prng: threefry"))

    def prng(folder, *words):
        start = plan_start(PretrainConfig, RunOptions(), tmp_path / folder, read_settings(words).all)
        return build_config(
            PretrainConfig, [*read_settings([*TINY.split(), *words]).all, *start.settings]
        ).execution.prng

    assert prng("w") == "threefry"
    assert prng("w", "--execution.prng", "rbg") == "rbg"
    assert prng("new") == "hash"
    (tmp_path / "w" / "config.yaml").write_text("execution: 3")
    assert prng("w") == "hash"


@pytest.mark.slow
def test_resume_refuses_another_vocabulary(tmp_path):
    train_synthetic(tiny("--training.num_steps 2"), tmp_path / "w")
    metadata = tmp_path / "vocab.txt"
    metadata.write_text(metadata.read_text().replace("w7\n", "x7\n"))
    import support

    original, support.write_vocabulary = support.write_vocabulary, lambda folder: metadata
    try:
        with pytest.raises(ValueError, match="another vocabulary"):
            train_synthetic(tiny(), tmp_path / "w")
    finally:
        support.write_vocabulary = original


def test_continue_from_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint"):
        train_synthetic(tiny(), tmp_path / "w", continue_from=tmp_path)


def test_a_workdir_in_use_is_refused(tmp_path):
    with hold_folder(tmp_path / "w", "taken"), pytest.raises(ValueError, match="another run is using this workdir"):
        train_synthetic(tiny(), tmp_path / "w")


@pytest.mark.slow
def test_batch_ramp_trains_with_each_size(tmp_path):
    config = tiny("--training.batch_ramp 2 4 --training.num_steps 4 --training.log_interval 1")

    class Ramp(SyntheticSource):
        def train(self, rows):
            iterator = super().train(rows)
            step = iterator.__class__.__next__

            class Iterator(iterator.__class__):
                def __next__(self):
                    batch, info = step(self)
                    size = 4 if info.data_step < 2 else 8
                    return {name: value[:size] for name, value in batch.items()}, info

            return Iterator(config, rows)

    train_synthetic(config, tmp_path / "w", source=Ramp(config))
    assert len([line for line in read_metrics(tmp_path / "w") if "split" not in line]) == 4


@pytest.mark.slow
def test_profiler_names_the_step(tmp_path):
    config = tiny("--training.profile_steps 2 3 --training.num_steps 4")
    train_synthetic(config, tmp_path / "w")
    traces = list((tmp_path / "w" / "profile").rglob("*.xplane.pb"))
    assert traces and b"train_step" in traces[0].read_bytes()


@pytest.mark.parametrize("arguments", ["--training.global_batch_size 6"])
def test_a_batch_that_the_mesh_does_not_divide_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"training\.global_batch_size: 6 "):
        train_synthetic(tiny(arguments), tmp_path / "w", devices=None)
    with pytest.raises(ValueError, match="mesh: data 3 x fsdp 1 x tensor 1 needs 3 devices, but 8"):
        train_synthetic(tiny("--mesh.data 3"), tmp_path / "w", devices=None)


def test_a_name_that_no_parameter_has_is_refused_before_the_workdir_is_changed(tmp_path):
    with pytest.raises(
        ValueError, match=r"optimizer\.without_decay: no parameter has 'relu' in its name; names with"
    ):
        train_synthetic(tiny("--optimizer.weight_decay 0 --optimizer.without_decay embedding relu"), tmp_path / "w")
    assert not (tmp_path / "w" / "config.yaml").exists()


def test_a_phase_must_go_beyond_the_one_before(tmp_path):
    train_synthetic(tiny("--training.num_steps 6"), tmp_path / "one")
    with pytest.raises(ValueError, match=r"training\.num_steps: 6 is not above 6"):
        train_synthetic(tiny("--training.num_steps 6"), tmp_path / "two", continue_from=tmp_path / "one")
    assert not (tmp_path / "two" / "config.yaml").exists()


@pytest.mark.slow
def test_refused_data_change_nothing_in_the_workdir(tmp_path):
    config = tiny("--training.num_steps 4")
    train_synthetic(config, tmp_path / "w")
    before = {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file()}

    class Refusing(SyntheticSource):
        def train(self, rows):
            raise ValueError("other data")

    longer = tiny("--training.num_steps 8")
    with pytest.raises(ValueError, match="other data"):
        train_synthetic(longer, tmp_path / "w", source=Refusing(longer))
    assert before == {p: p.read_bytes() for p in (tmp_path / "w").rglob("*") if p.is_file()}


@pytest.mark.slow
def test_every_line_has_every_key(tmp_path):
    config = tiny("--training.num_steps 4 --data.next_sentence none")
    train_synthetic(config, tmp_path / "w", source=SyntheticSource(config, poison=frozenset({2, 3})))
    first, second = (line for line in read_metrics(tmp_path / "w") if "split" not in line)
    assert first.keys() == second.keys() >= {"loss", "nsp_loss", "nsp_accuracy", "grad_norm", "mfu", "epoch"}
    assert first["nsp_loss"] is None and first["loss"] > 0 and second["loss"] is None
