"""The best evaluation of a fine-tuning run so far, and the folder ``best/`` of the parameters that a run keeps."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.config import ModelSpec, to_dict
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.interop.exchange import ModelBundle, parameter_shapes
from bert_jax.interop.initialization import Start
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import BEST, replace_saved
from bert_jax.metrics import Score
from bert_jax.model import from_canonical, to_canonical
from bert_jax.parallel import to_host
from bert_jax.process import hosts

# Metrics of an evaluation, by dev split and name; None where one is not defined.
Values = Mapping[str, Mapping[str, float | None]]


@dataclass
class BestCheckpoint:
    """State of the evaluations that choose the parameters, as checkpoints keep it."""

    value: float | None = None
    step: int = 0
    # Evaluations since then.
    waited: int = 0
    # Step of the newest evaluation.
    judged: int = 0
    # What decides: the name of the metric, and the digest of the records that it is measured on.
    metric: str = ""
    split: str = ""

    def judge(self, score: Score, value: float | None, step: int, split: str, min_delta: float) -> bool:
        """Take in the ``value`` of an evaluation; True if it is the best. One that is not defined, such as the
        correlation of constants, never is."""
        sign = 1 if score.higher_is_better else -1
        better = value is not None and (self.value is None or sign * (value - self.value) > max(min_delta, 0.0))
        if better:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1
        self.judged, self.metric, self.split = step, score.name, split
        return better

    def require_same(self, metric: str, split: str) -> None:
        """Raise ``ValueError`` if further values could not be compared with those so far."""
        if metric != self.metric:
            raise ValueError(
                f"task.metric: the run chose by {self.metric} so far, now {metric}: their values cannot be "
                "compared; give the same or another --workdir"
            )
        if split != self.split:
            raise ValueError(
                "data.dev: the best parameters so far were chosen on other records; give the same or another "
                "--workdir"
            )

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "BestCheckpoint":
        """Restore the value of :meth:`state`, also of an older version."""
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls) if field.name in state})


def save_parameters(
    folder: Path, resolved: ResolvedTask, start: Start, params: Any, step: int, values: Values
) -> None:
    """Write the model of ``step`` into ``best/`` of the workdir ``folder``; every process calls it."""
    flat = to_canonical(to_host(params), resolved.config.model.vocab_size)
    if hosts.is_lead():
        replace_saved(folder / BEST, _saved_model(resolved, start, flat, step, values), step)


def read_parameters(folder: Path, params: Any, vocab_size: int) -> tuple[Any, int]:
    """Return the parameters in ``best/`` of ``folder``, sharded like ``params``, and their step."""
    stored = read_weights(folder / BEST)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    # Heads of losses beside the task's are not among the stored ones, and are not needed any more.
    flat = to_canonical(params, vocab_size) | dict(stored.params)
    values = from_canonical(flat, like, vocab_size)
    params = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), values, params)
    return params, stored.origin["step"]


def _saved_model(
    resolved: ResolvedTask,
    start: Start,
    params: Mapping[str, np.ndarray],
    step: int,
    values: Values,
) -> ModelBundle:
    """Return the model of ``step`` with its canonical ``params``; ``values`` are its metrics by dev split and
    name."""
    config = resolved.config
    spec = ModelSpec(
        model=config.model,
        heads=resolved.heads,
        sentence=resolved.task.sentence,
        tokenizer=start.tokenizer_config,
        family="roberta" if config.model.position_offset else "bert",
    )
    metrics = {f"{split}: {name}": value for split, named in values.items() for name, value in named.items()}
    origin = {
        "format": "fine-tuning run", "name": config.name, "step": step, "init_from": start.source,
        "recipe": to_dict(config), "metrics": {"step": step, **metrics} if metrics else {},
    }  # fmt: skip
    arrays = {name: np.asarray(params[name], np.float32) for name in parameter_shapes(spec)}
    return ModelBundle(spec=spec, params=arrays, tokenizer_content=start.tokenizer_content, origin=origin)
