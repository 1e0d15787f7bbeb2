"""Device memory that does not suffice: one clear line for each part of a run."""

import jax
import pytest
from support import tiny_config, train_synthetic

from bert_jax.config import MeshConfig
from bert_jax.model import BertForPretraining
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training import pretrain
from bert_jax.training.checkpoint import saved_steps
from bert_jax.training.compile import OutOfMemory, TrainPrograms, explain_memory, state_bytes
from bert_jax.training.state import abstract_state


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr("bert_jax.training.pretrain.make_mesh", lambda config: one)


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
         "x needs more per device than there is, the last 16.0 GiB of it were refused, available unknown; do y"),
        ("Out of memory while trying to allocate 1.50GiB.", "the last 1.5 GiB of it were refused"),
        ("Attempting to reserve 5.25G at the bottom of memory. That was not possible. There are 4.1G free.",
         "the last 5.2 GiB of it were refused"),
        ("Attempting to allocate 512.0M.", "the last 0.5 GiB of it were refused"),
        ("no number", "x needs more per device than there is, available unknown; do y"),
    ],
)  # fmt: skip
def test_what_compilers_and_allocators_say_becomes_one_line(message, line):
    with pytest.raises(OutOfMemory) as raised, explain_memory("x", "do y"):
        no_memory(message)()
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_known_of_the_need_is_said_and_other_errors_pass():
    line = r"x needs 8\.0 GiB per device, the last 3\.0 GiB of it were refused"
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
    abstract = abstract_state(model, make_optimizer(config.optimizer), mesh, with_ema=False)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    assert 0.45 * whole < state_bytes(abstract) < 0.7 * whole


def test_a_state_beyond_any_memory(tmp_path):
    """The device's own words."""
    config = tiny_config("--model.intermediate_size 100000000000")
    with pytest.raises(OutOfMemory, match=r"the model's state needs 2[\d,.]+ GiB per device.*mesh\.fsdp \(now 1\)"):
        train_synthetic(config, tmp_path / "w")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("bert_jax.training.pretrain.initial_state",
         r"the model's state needs [\d,]+ bytes per device, .*mesh\.fsdp"),
        ("bert_jax.training.pretrain.restore_newest",
         r"the model's state needs [\d,]+ bytes per device, .*mesh\.fsdp"),
        ("bert_jax.training.pretrain.evaluate_held_out",
         r"an evaluation step needs .*; lower training\.eval_batch_size \(now 8\)$"),
        ("bert_jax.training.pretrain.CheckpointWriter.save", r"saving the state needs .*mesh\.fsdp"),
        ("bert_jax.training.loop.Recorder.add",
         r"the training step needs [\d,]+ bytes per device, .*raise training\.accumulation_steps \(now 1\)"),
    ],
)  # fmt: skip
def test_each_part_of_a_run_has_its_own_line(tmp_path, monkeypatch, target, line):
    monkeypatch.setattr(target, no_memory())
    with pytest.raises(OutOfMemory, match=line) as raised:
        train_synthetic(tiny_config("--training.num_steps 2"), tmp_path / "w")
    assert "the last 3.0 GiB of it were refused" in str(raised.value) and "\n" not in str(raised.value)


def test_a_step_that_does_not_compile_names_its_state():
    config = tiny_config()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    abstract = abstract_state(model, make_optimizer(config.optimizer), mesh, with_ema=False)
    programs = TrainPrograms(no_memory(), abstract, config, mesh)
    with pytest.raises(OutOfMemory, match=rf"\(its state alone takes {state_bytes(abstract):,} bytes\) needs more"):
        programs.step_for(8)


def test_a_report_goes_without_filled_masks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrain, "_fill_some", no_memory())
    train_synthetic(tiny_config("--training.num_steps 2"), tmp_path / "w")
    assert "filling masks needs" in capsys.readouterr().out
    assert (tmp_path / "w" / "report.html").exists() and saved_steps(tmp_path / "w") == [2]
