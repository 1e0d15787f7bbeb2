"""The best evaluation of a fine-tuning run, and the folder ``best/`` that contains its parameters."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.config import ModelSpec, spec_from_json, to_dict
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_files import BEST, SPEC_FILE
from bert_jax.interop.saved_model import replace_saved
from bert_jax.interop.taken_over import with_prompts
from bert_jax.metrics import Score
from bert_jax.model import from_canonical, to_canonical
from bert_jax.model.canonical import Params
from bert_jax.parallel import to_host
from bert_jax.process import hosts
from bert_jax.start.start import Start

# Metrics of an evaluation, by dev split and name; None: undefined.
Values = Mapping[str, Mapping[str, float | None]]


@dataclass
class BestCheckpoint:
    """The state of the evaluations that select the best parameters; it is part of a checkpoint."""

    value: float | None = None
    step: int = 0
    # Number of evaluations since the best one.
    waited: int = 0
    # Step of the newest evaluation.
    judged: int = 0
    # Name of the selecting metric, and digest of the records that it is computed on.
    metric: str = ""
    split: str = ""

    def judge(self, score: Score, value: float | None, step: int, split: str) -> bool:
        """Record ``value``, the score of an evaluation; return True if it improves on the best value.
        An undefined value (None), such as a correlation with a constant, is never the best."""
        sign = 1 if score.higher_is_better else -1
        better = value is not None and (self.value is None or sign * (value - self.value) > 0)
        if better:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1
        self.judged, self.metric, self.split = step, score.name, split
        return better

    def require_same(self, metric: str, split: str) -> None:
        """Raise ``ValueError`` if values of ``metric`` on ``split`` are not comparable with the recorded values."""
        if metric != self.metric:
            raise ValueError(
                f"task.metric: {metric} is not comparable with {self.metric}, which has selected the best "
                f"parameters so far; use {self.metric}, or another --workdir"
            )
        if split != self.split:
            raise ValueError(
                "data.dev: the run has selected the best parameters on other records; use the same dev "
                "files, or another --workdir"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the fields from a checkpoint; fields that an older version did not store get their defaults."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state.get(field.name, field.default))


def save_parameters(
    folder: Path, resolved: ResolvedTask, start: Start, params: Params, step: int, values: Values
) -> None:
    """Write the model at ``step``, with its metrics ``values``, to ``best/`` in the workdir ``folder``.

    Must be called by every process.
    """
    config = resolved.config
    flat = to_canonical(to_host(params), config.model.vocab_size)
    if not hosts.is_lead():
        return
    spec = _spec(resolved, start)
    metrics = {f"{split}: {name}": value for split, named in values.items() for name, value in named.items()}
    origin = {
        "format": "fine-tuning run", "name": config.name, "step": step, "init_from": start.source,
        "recipe": to_dict(config), "metrics": {"step": step, **metrics} if metrics else {},
    }  # fmt: skip
    arrays = {name: np.asarray(flat[name], np.float32) for name in parameter_shapes(spec)}
    model = ModelBundle(spec=spec, params=arrays, tokenizer_content=start.tokenizer_content, origin=origin)
    replace_saved(folder / BEST, model, step)


def _spec(resolved: ResolvedTask, start: Start) -> ModelSpec:
    """Return the description of the model of a run."""
    config, tokenizer = resolved.config, start.tokenizer_config
    if resolved.task.sentence is not None:  # vectors of longer texts were not trained
        tokenizer = dataclasses.replace(tokenizer, max_length=config.task.max_length)
    return ModelSpec(
        model=config.model,
        heads=resolved.heads,
        sentence=with_prompts(resolved.task.sentence, start.kept),
        tokenizer=tokenizer,
        family=config.model.family_name,
        task=config.settings,
    )


def describe_again(folder: Path, resolved: ResolvedTask, start: Start) -> None:
    """Write the model in ``best/`` again if a finished run predicts with other options than those stored in it."""
    spec, file = _spec(resolved, start), folder / BEST / SPEC_FILE
    if spec_from_json(file.read_text(encoding="utf-8"), str(file)) != spec:
        stored = read_weights(folder / BEST)
        replace_saved(folder / BEST, dataclasses.replace(stored, spec=spec), stored.origin["step"])


def read_parameters(folder: Path, params: Params, vocab_size: int) -> tuple[Any, int]:
    """Return the parameters in ``best/`` of the workdir ``folder``, sharded like ``params``, and their step."""
    stored = read_weights(folder / BEST)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    # Heads of auxiliary losses are not stored: they keep their values in ``params``.
    flat = to_canonical(params, vocab_size) | dict(stored.params)
    values = from_canonical(flat, like, vocab_size)
    params = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), values, params)
    return params, stored.origin["step"]
