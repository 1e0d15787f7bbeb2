"""Every option of fine-tuning reaches the run: 20 steps end elsewhere with it, or not where they should not."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from finetune_cases import SPLITS, TWO_LAYERS, configured, saved_model

from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.model import to_canonical
from bert_jax.parallel import make_mesh, to_global
from bert_jax.records import Record
from bert_jax.training.state import initial_state

# Every run compiles a step.
pytestmark = pytest.mark.slow
STEPS = 20
WINDOWS, TAGGING = "--task.truncation windows --task.window_overlap 4", "--task.kind tagging"
BASE = f"--training.num_steps {STEPS} --training.global_batch_size 8 --input.max_shapes 1 --task.max_length 24"
# So long that windows and cuts differ.
LONG = [
    dataclasses.replace(record, text=". ".join([record.text, *(f"W{(i + j) % 60} w{j}" for j in range(15))]))
    for i, record in enumerate(SPLITS["train"])
]
WORDS = [tuple(record.text.split()) for record in SPLITS["train"]]
TAGGED = [
    Record(id="", source="", words=words, tags=tuple("B-X" if word in ("good", "bad") else "O" for word in words))
    for words in WORDS
]
UNEVEN = [record for i, record in enumerate(SPLITS["train"]) if record.label == "1" or i % 4 == 0]


@pytest.fixture(scope="module")
def end_of(tmp_path_factory):
    """Function of options (and records): canonical parameters after 20 steps."""
    models = tmp_path_factory.mktemp("models")
    one, two = saved_model(models / "one"), saved_model(models / "two", model=TWO_LAYERS)

    @functools.cache
    def trained(options, which="texts", layers=1):
        records = {"texts": SPLITS["train"], "long": LONG, "uneven": UNEVEN, "tagged": TAGGED}[which]
        source = one if layers == 1 else two
        config, start = configured(source, source / "none", f"{BASE} {options}")
        job = FinetuneJob(config, {"train": records, "dev": records[:8]}, [], start)
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        programs = job.programs(mesh)
        given = job.start().params
        state = initial_state(programs.model, programs.optimizer, programs.abstract, config.training.seed, given)
        batches = job.data(mesh, complete=False).batches
        for _ in range(STEPS):
            features, _ = next(batches)
            batch = to_global(features, mesh, len(features["input_ids"]))
            state, _ = programs.step_for(batch)(state, batch)
        return to_canonical(state.params if state.ema is None else state.ema, config.model.vocab_size)

    return trained


def distance(one, other):
    """Largest difference between the parameters that both have, relative to how far weights are from 0."""
    common = [name for name in one if name in other and one[name].shape == other[name].shape]
    assert any(name.startswith("encoder/layer_0/") for name in common)
    return max(float(np.abs(one[name] - other[name]).max()) for name in common)


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ("--model.hidden_dropout 0.4", "texts"),
        ("--model.attention_dropout 0.4", "texts"),
        ("--regularization.head_dropout 0.6", "texts"),
        ("--regularization.weight_dropout 0.2", "texts"),
        ("--regularization.mixout 0.5", "texts"),
        ("--regularization.reinit_layers 1", "texts"),
        ("--optimizer.weight_decay 0.3", "texts"),
        ("--optimizer.weight_decay_type l2", "texts"),
        ("--optimizer.decay_to_start true", "texts"),
        ("--optimizer.name bert_adam", "texts"),
        ("--optimizer.layer_decay 0.5", "texts"),
        ("--optimizer.frozen embeddings layer_0", "texts"),
        ("--optimizer.unfreeze_every 1", "texts"),
        ("--optimizer.schedule slanted_triangular", "texts"),
        ("--optimizer.schedule cosine", "texts"),
        ("--optimizer.warmup_fraction 0.5", "texts"),
        ("--optimizer.ema_decay 0.9", "texts"),
        ("--optimizer.clip_norm 0.01", "texts"),
        ("--loss.label_smoothing 0.2", "texts"),
        ("--loss.focal_gamma 2", "texts"),
        ("--loss.class_weights balanced", "uneven"),
        ("--loss.mlm_weight 0.5", "texts"),
        ("--loss.nsp_weight 0.5", "texts"),
        ("--loss.layers 1", "texts"),
        ("--loss.layers 1 --loss.layer_weight 0.9", "texts"),
        ("--input.balanced true", "uneven"),
        ("--input.few_shot 10", "texts"),
        ("--input.word_dropout 0.3", "texts"),
        ("--input.span_deletion 0.4", "texts"),
        ("--features.layers embeddings", "texts"),
        ("--features.layers second_to_last", "texts"),
        ("--features.layers weighted_all", "texts"),
        ("--features.frozen_encoder true", "texts"),
        ("--task.truncation tail", "long"),
        ("--task.truncation head_tail", "long"),
        ("--task.truncation head_tail --task.head_share 0.6", "long"),
        ("--task.truncation key_sentences", "long"),
        (WINDOWS, "long"),
        (f"{WINDOWS} --task.max_windows 2", "long"),
        (f"{TAGGING} --tagging.crf true", "tagged"),
        (f"{TAGGING} --features.bilstm_size 8", "tagged"),
        ("--training.seed 4", "texts"),
    ],
)  # fmt: skip
def test_an_option_changes_the_run(end_of, options, which):
    layers = 2 if re.search("layer|unfreeze|features|decay_to_start", options) else 1
    found = end_of(options, which, layers)
    assert all(np.isfinite(values).all() for values in found.values())
    # All but the last option, where they are several; what takes two words stands above.
    without = "" if options in (WINDOWS, TAGGING) else options.rpartition(" --")[0]
    assert distance(found, end_of(without, which, layers)) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        "--input.packing false",
        "--input.max_shapes 8",
        "--training.accumulation_steps 2",
        "--execution.scan_layers true",
        "--loss.focal_gamma 0 --loss.label_smoothing 0 --loss.mlm_weight 0 --regularization.mixout 0",
        "--optimizer.layer_decay 1 --optimizer.decay_to_start false --features.layers last",
    ],
)  # fmt: skip
def test_an_option_that_should_not_change_it(end_of, options):
    plain = "--model.hidden_dropout 0 --model.attention_dropout 0"
    assert distance(end_of(f"{plain} {options}", layers=2), end_of(plain, layers=2)) < 2e-4
