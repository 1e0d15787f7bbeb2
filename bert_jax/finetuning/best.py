"""The best evaluation of a fine-tuning run so far, and how long nothing was better."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_jax.metrics import Score


@dataclass
class BestCheckpoint:
    """What is kept in checkpoints of the evaluations that choose the parameters."""

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
        """Take in the ``value`` of an evaluation; whether it is the best. One that is not defined, such as the
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
        """``ValueError`` where further values would not be of the same kind as those so far."""
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
        """What :meth:`state` gave, also that of an older version."""
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls) if field.name in state})
