"""Metrics of a log interval: sums and weights over its steps, divided once, when the line is written."""

from collections.abc import Mapping
from typing import Any

from bert_jax.batch import DataBudgetError

# Present in every line, null where there is nothing to say (no such head, every step skipped).
ALWAYS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm", "padding_fraction")


class IntervalMeter:
    """Adds up the metrics of steps. Its state goes into the checkpoint, so a resumed run logs the same lines."""

    def __init__(self, max_blank_records: int) -> None:
        self._max_blank_records = max_blank_records
        self.blank_records = 0  # rows without content, of all processes, since the phase began
        self.skipped_steps = 0  # since the phase began
        self.bad_in_a_row = 0
        self._sums: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add one step's metrics (host values). A skipped step counts, but its values are left out.

        Raises ``DataBudgetError`` above ``max_blank_records`` damaged records: a process that reads all rows
        finds that by itself and earlier.
        """
        self._last = {"learning_rate": float(metrics["learning_rate"])}
        self.blank_records += int(metrics["blank_rows"])
        allowed = self._max_blank_records
        if self.blank_records > allowed:
            raise DataBudgetError(
                f"{self.blank_records} damaged records, more than data.max_blank_records ({allowed}); "
                "restore the shards or allow more; each process has named those that it read"
            )
        if not metrics["finite"]:
            self.skipped_steps += 1
            self.bad_in_a_row += 1
            return
        self.bad_in_a_row = 0
        pairs = dict(metrics["sums"]) | {"loss": (metrics["loss"], 1), "grad_norm": (metrics["grad_norm"], 1)}
        for name, (total, weight) in pairs.items():
            pair = self._sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(total)
            pair[1] += float(weight)

    def line(self) -> dict[str, float | int | None]:
        """Means since the last line; starts the next interval."""
        means: dict[str, float | None] = dict.fromkeys(ALWAYS)
        means |= {name: total / weight if weight else None for name, (total, weight) in self._sums.items()}
        self._sums = {}
        counts = {"skipped_steps": self.skipped_steps, "blank_records": self.blank_records}
        return {**means, **self._last, **counts}

    def state(self) -> dict[str, Any]:
        """JSON-able state (floats survive JSON exactly)."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        counts = {"skipped_steps": self.skipped_steps, "blank_records": self.blank_records}
        return {**counts, "bad_in_a_row": self.bad_in_a_row, "sums": sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self.skipped_steps, self.bad_in_a_row = state["skipped_steps"], state["bad_in_a_row"]
        self.blank_records = state["blank_records"]
        self._sums = {name: list(pair) for name, pair in state["sums"].items()}
