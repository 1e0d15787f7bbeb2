"""What the tests of fine-tuning runs share: a tiny model, records that it can learn, a run."""

import dataclasses
import functools
import json
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from builders import content, words
from support import shared_first_states, shared_programs, untimed

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, RunOptions, TokenizerConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings
from bert_jax.config.options import extended
from bert_jax.finetuning.evaluation import Predictor
from bert_jax.finetuning.finetune import finetune
from bert_jax.finetuning.supervision import LABELS_ONLY
from bert_jax.finetuning.training_model import training_programs
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.saved_model import write_saved
from bert_jax.metrics.resampling import confidence_intervals
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record
from bert_jax.start.plan import plan_start
from bert_jax.training.launch import Launch

PIECES = [*words(60), "good", "bad"]
MODEL = ModelConfig(
    vocab_size=len(PIECES), hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=64,
)  # fmt: skip
TWO_LAYERS = dataclasses.replace(MODEL, num_layers=2)
ARGUMENTS = (
    "--training.num_epochs 2 --training.global_batch_size 8 --training.log_interval 5 --task.max_length 32 "
    "--optimizer.learning_rate 5e-3 --training.compilation_cache none --training.seed 3"
)


def saved_model(
    folder: Path,
    heads: HeadsConfig = HeadsConfig(pooler=True),  # noqa: B008 (frozen)
    model: ModelConfig = MODEL,
) -> Path:
    """A saved model with drawn weights."""
    spec = ModelSpec(model=model, heads=heads, tokenizer=TokenizerConfig())
    rng = np.random.default_rng(0)
    params = {
        name: np.ones(shape, np.float32) if name.endswith("scale") else
        rng.normal(0, 0.05, shape).astype(np.float32) * (not name.endswith("bias"))
        for name, shape in parameter_shapes(spec).items()
    }  # fmt: skip
    write_saved(folder, ModelBundle(spec=spec, params=params, tokenizer_content=content(PIECES)))
    return folder


def records(count: int, seed: int) -> list[Record]:
    """Texts of 1 to 12 words with "good" or "bad" in them, which the label names."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        label = str(rng.integers(0, 2))
        words = [f"w{n}" for n in rng.integers(0, 60, rng.integers(1, 12))]
        words.insert(int(rng.integers(0, len(words) + 1)), ("bad", "good")[int(label)])
        found.append(Record(id=str(i), source=f"file:{i}", text=" ".join(words), label=label))
    return found


SPLITS = {"train": records(70, 1), "dev": records(21, 2)}


def configured(source: Path, workdir: Path, arguments: str = ""):
    """(config, start) as run_finetune.py makes them."""
    words = f"{ARGUMENTS} {arguments}".split()
    config_type = extended(FinetuneConfig)
    start = plan_start(config_type, RunOptions(init_from=str(source)), workdir, read_settings(words).all)
    return build_config(config_type, [*read_settings(words).all, *start.settings]), start


def run(
    source: Path,
    workdir: Path,
    arguments: str = "",
    splits=SPLITS,
    tests=(),
    devices=1,
    supervision=LABELS_ONLY,
    **options,
):
    """Fine-tune in ``workdir`` on so many devices."""
    config, start = configured(source, workdir, arguments)
    launch = Launch(
        workdir=workdir, start=start, **{"stop": StopRequest(), "devices": jax.devices()[:devices], **options}
    )

    def programs(resolved, model, mesh):
        rest = {
            "restore_best": True,
            "checkpoint_interval": 1,
            "log_interval": 1,
            "patience": 0,
        }  # no program reads them
        ended = dataclasses.replace(config, training=dataclasses.replace(config.training, **rest))
        key = (ended, source, repr(splits.get("train")), mesh, repr(resolved.supervision.key))
        return shared_programs(key, lambda: training_programs(resolved, model, mesh))

    with (
        shared_first_states(),
        mock.patch("bert_jax.finetuning.finetune.training_programs", programs),
        mock.patch("bert_jax.finetuning.evaluation.Predictor", _Predictor),
        mock.patch("bert_jax.finetuning.evaluation.confidence_intervals", _confidence_intervals),
    ):
        finetune(config, launch, splits=splits, tests=tests, start=start, supervision=supervision)


_confidence_intervals = functools.partial(confidence_intervals, resamples=50)
_STEPS: dict = {}


class _Predictor(Predictor):
    """Programs of an equal model serve the runs of a test file together."""

    def __init__(self, task, model, mesh):
        super().__init__(task, model, mesh)
        sections = [
            getattr(task.config, name) for name in ("task", "data", "qa", "tagging", "sentence", "features", "loss")
        ]
        key = (type(task), model, mesh, repr(sections))
        if len(_STEPS) == 12:
            _STEPS.clear()
        self.step = _STEPS.setdefault(key, self.step)


def results(workdir: Path) -> dict[str, dict]:
    """Entries of metrics.json by split."""
    return {entry["split"]: entry for entry in json.loads((workdir / "metrics.json").read_text())}


def lines(workdir: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    return untimed([json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()])


def with_labels(splits, change):
    """``splits`` with every label changed."""
    return {
        name: [dataclasses.replace(record, label=change(record.label)) for record in found]
        for name, found in splits.items()
    }
