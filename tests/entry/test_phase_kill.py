"""Three phases in tokens, as in recipes of modern encoders, with kill -9 in each: nothing is lost, nothing is
doubled, and the next phase starts from the same state."""

import command
import jax
import numpy as np
import pytest
import yaml
from support import objective_of, untimed
from test_kill import DEVICES, kill_when, logged_step

from bert_jax.config import PretrainConfig, load_config
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = [pytest.mark.entry, pytest.mark.slow]
TOKENS = 8 * 16  # of a batch of the first phase


def recipes(folder):
    """The recipes of the phases: a ramp and a warmup; a longer context, another base and other masks; a decay."""
    model = {"position_embeddings": "rotary", "max_position_embeddings": 128}
    optimizer = {"name": "stable_adamw", "clip_norm": 0.0, "beta2": 0.98, "weight_decay_type": "independent"}
    first = command.recipe(folder, mesh={"data": DEVICES}, model=model, optimizer=optimizer)
    values = yaml.safe_load(first.read_text())
    del values["training"]["num_steps"], values["optimizer"]["warmup_steps"]
    data = values["data"]
    paths = []
    for name, changes in (
        ("one", {
            "optimizer": {"schedule": "wsd", "wsd_decay_fraction": 0.0, "warmup_tokens": 10 * TOKENS},
            "training": {"num_tokens": 50 * TOKENS, "batch_ramp": [6 * TOKENS, 2, 2]},
        }),
        ("two", {
            "data": {
                "seq_length": 32, "max_predictions": 10, "mask_fraction": 0.3, "masking": "dynamic",
                "vocab": f"{data['shards']}/vocab.txt", "shards": str(folder / "longer"),
            },
            "model": {"rotary_base": 160_000.0},
            "optimizer": {"schedule": "constant", "learning_rate": 5e-4, "restart_schedule": True},
            "training": {"num_tokens": 50 * TOKENS, "global_batch_size": 4},
        }),
        ("three", {
            "optimizer": {
                "schedule": "wsd", "wsd_decay": "one_minus_sqrt", "wsd_decay_tokens": 50 * TOKENS,
                "final_fraction": 0.001,
            },
            "training": {"num_tokens": 50 * TOKENS},
        }),
    ):  # fmt: skip
        if name == "two":
            del values["optimizer"]["warmup_tokens"], values["training"]["batch_ramp"]
            values["optimizer"]["warmup_steps"] = 0
        for section, options in changes.items():
            values[section] |= options
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(values))
    return paths


def phase(recipe, workdir, before):
    words = ["--config", recipe, "--workdir", workdir]
    return [*words, "--continue_from", before] if before else words


def stored(workdir):
    """The newest state, with the config that the workdir holds."""
    config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
    mesh = make_mesh(config.mesh, jax.devices()[:DEVICES])
    model = objective_of(config, mesh).model
    return config, restore_newest(workdir, config, mesh, model, read_only=True, may_change=set(), report=print)


def moments(workdir, first_step):
    """Before the first checkpoint of the phase, and between a logged step and its checkpoint."""
    return (
        (workdir / "config.yaml").exists,
        lambda: logged_step(workdir) >= first_step + 25,
    )


def test_killed_phases_are_bitwise_the_undisturbed_ones(tmp_path):
    ends, kills, before = [0], 0, {}
    for number, recipe in enumerate(recipes(tmp_path)):
        whole, cut = tmp_path / f"whole{number}", tmp_path / f"cut{number}"
        code, _, err = command.run(*phase(recipe, whole, before.get("whole")), devices=DEVICES)
        assert code == 0, err
        for moment in moments(cut, ends[-1]):
            process = command.start(*phase(recipe, cut, before.get("cut")), devices=DEVICES)
            kills += kill_when(process, moment)
        code, _, err = command.run(*phase(recipe, cut, before.get("cut")), devices=DEVICES)
        assert code == 0, err
        config, expected = stored(whole)
        own, found = stored(cut)
        assert own == config and config.training.first_step == (ends[-1] if number else 0)
        assert found.step == expected.step == config.training.num_steps
        jax.tree.map(np.testing.assert_array_equal, found.state, expected.state)
        assert untimed(read_metrics(cut)) == untimed(read_metrics(whole))
        ends.append(found.step)
        before = {"whole": whole, "cut": cut}
    assert ends[2] - ends[1] == ends[3] - ends[2] == 50
    assert kills >= 4
    print(f"{kills} kills, phases end at steps {ends[1:]}")
