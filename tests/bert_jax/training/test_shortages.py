"""Device memory and held-out data that do not suffice: one clear line, and what was trained is kept."""

import dataclasses

import jax
import pytest
from support import SyntheticSource, objective_of, tiny_config, train_synthetic, untimed

from bert_jax.batch import DataBudgetError
from bert_jax.config import MeshConfig
from bert_jax.model import BertForPretraining
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.run_files import has_report
from bert_jax.training.memory import OutOfMemory, device_bytes, explain_memory
from bert_jax.training.programs import TrainPrograms, pretraining_batch
from bert_jax.training.state import abstract_state

# ------------------------------------------------------------------ device memory


def no_memory(message="Out of memory allocating 3221225472 bytes."):
    def raising(*arguments, **options):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}\nmore lines")

    return raising


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Ran out of memory in memory space hbm. Used 17.89G of 15.48G hbm. Exceeded hbm capacity by 2.41G.",
         "x needs 17.9 GiB per device, available 15.5 GiB; do y"),
        ("Out of memory while trying to allocate 17179869184 bytes.",
         "the allocation of the last 16.0 GiB failed, the available memory is unknown; do y"),
        ("Out of memory while trying to allocate 1.50GiB.", "the allocation of the last 1.5 GiB failed"),
        ("Attempting to reserve 5.25G at the bottom of memory. That was not possible. There are 4.1G free.",
         "the allocation of the last 5.2 GiB failed"),
        ("Attempting to allocate 512.0M.", "the allocation of the last 0.5 GiB failed"),
        ("no number", "x needs more per device than is available, the available memory is unknown; do y"),
    ],
)  # fmt: skip
def test_what_compilers_and_allocators_say_becomes_one_line(message, line):
    with pytest.raises(OutOfMemory) as raised, explain_memory("x", "do y"):
        no_memory(message)()
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_known_of_the_need_is_said_and_other_errors_pass():
    line = r"x needs 8\.0 GiB per device, the allocation of the last 3\.0 GiB failed"
    with pytest.raises(OutOfMemory, match=line), explain_memory("x", "do y", lambda: 8 * 2**30):
        no_memory()()
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, explain_memory("x", "do y"):
        raise other
    assert raised.value is other


def test_bytes_of_the_state_on_one_device():
    config = tiny_config()
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2), jax.devices()[:2])
    abstract = abstract_state(config, model, make_optimizer(config.optimizer), mesh)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    assert 0.45 * whole < device_bytes(abstract) < 0.7 * whole


@pytest.mark.slow
def test_a_state_beyond_any_memory(tmp_path):
    """The device's own words."""
    config = tiny_config("--model.intermediate_size 2147483647")
    with pytest.raises(OutOfMemory, match=r"the model's state needs 1[\d,.]+ GiB per device.*mesh\.fsdp \(now 1\)"):
        train_synthetic(config, tmp_path / "w")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("bert_jax.start.state.initial_state",
         r"the model's state needs [\d,]+ bytes per device, .*mesh\.fsdp"),
        ("bert_jax.start.state.restore_newest",
         r"the model's state needs [\d,]+ bytes per device, .*mesh\.fsdp"),
        ("bert_jax.training.pretrain.PretrainJob._totals",
         r"an evaluation step needs .*; lower training\.eval_batch_size \(now 8\)$"),
        ("bert_jax.training.fit.CheckpointWriter.save", r"saving the state needs .*mesh\.fsdp"),
        ("bert_jax.training.loop.Recorder.add",
         r"the training step needs [\d,]+ bytes per device, .*raise training\.accumulation_steps \(now 1\)"),
    ],
)  # fmt: skip
def test_each_part_of_a_run_has_its_own_line(tmp_path, monkeypatch, target, line):
    monkeypatch.setattr(target, no_memory())
    with pytest.raises(OutOfMemory, match=line) as raised:
        train_synthetic(tiny_config("--training.num_steps 2"), tmp_path / "w")
    assert "the allocation of the last 3.0 GiB failed" in str(raised.value) and "\n" not in str(raised.value)


def test_a_step_that_does_not_compile_names_its_state():
    config = tiny_config()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    abstract = abstract_state(config, model, make_optimizer(config.optimizer), mesh)
    objective = objective_of(config, mesh)
    programs = TrainPrograms(no_memory(), abstract, objective, make_optimizer(config.optimizer))
    with pytest.raises(
        OutOfMemory, match=rf"\(its state alone needs {device_bytes(abstract):,} bytes\) needs more"
    ):
        programs.step_for(pretraining_batch(objective, 8))


@pytest.mark.slow
def test_a_report_goes_without_filled_masks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bert_jax.objectives.masked_lm.top_pieces", no_memory())
    train_synthetic(tiny_config("--training.num_steps 2"), tmp_path / "w")
    assert "computing the samples needs" in capsys.readouterr().out
    assert (tmp_path / "w" / "report.html").exists() and saved_steps(tmp_path / "w") == [2]


# ------------------------------------------------------------------ held-out data


@dataclasses.dataclass
class DamagedSource(SyntheticSource):
    """Its evaluations from number ``good`` on meet a damaged record."""

    good: int = 0

    def held_out(self, batch_size, rows, max_batches):
        batches = super().held_out(batch_size, rows, max_batches)
        if max_batches == 1:  # not an evaluation
            return batches
        self.good -= 1
        return batches if self.good >= 0 else self.damaged(next(batches))

    def damaged(self, batch):
        yield batch
        raise DataBudgetError("1 damaged records, more than data.max_blank_records (0)")


@pytest.mark.slow
@pytest.mark.parametrize(("good", "step"), [(0, 8), (2, 20)])
def test_a_damaged_held_out_record_costs_nothing_that_was_trained(tmp_path, good, step):
    """In any evaluation, the last among them: the step is saved, and mended data give the line that is missing."""
    config = tiny_config("--training.eval_interval 8 --training.eval_batches 2")
    train_synthetic(config, tmp_path / "whole")
    messages = []
    for source in (DamagedSource(config, good=good), DamagedSource(config)):  # the second: nothing was mended
        with pytest.raises(DataBudgetError, match="1 damaged records") as raised:
            train_synthetic(config, tmp_path / "cut", source=source)
        messages.append(str(raised.value))
        assert saved_steps(tmp_path / "cut")[-1] == step
        lines = read_metrics(tmp_path / "cut")
        assert [line["step"] for line in lines if "split" in line] == [8, 16][:good]
    assert messages[0].startswith(f"evaluation at step {step}: ") and "the state is saved" in messages[0]
    assert not has_report(tmp_path / "cut")
    train_synthetic(config, tmp_path / "cut")
    assert untimed(read_metrics(tmp_path / "cut")) == untimed(read_metrics(tmp_path / "whole"))
    assert has_report(tmp_path / "cut")
