"""Inputs of a run that are not part of its config. Imports no jax."""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bert_jax.io.storage import Location
from bert_jax.process.signals import StopRequest

if TYPE_CHECKING:
    import jax

# File of a workdir: options that the initial model determines, so that a resumed run needs no flags for them.
RECORD = "warm_start.yaml"


@dataclass(kw_only=True)
class InitialModel:
    """Parameters that a run starts from instead of drawn ones; ``bert_jax.interop.initialization`` plans them."""

    # Canonical name -> float32 array; missing parameters are drawn.
    params: dict[str, np.ndarray] = field(default_factory=dict)
    # Lines for the log.
    messages: tuple[str, ...] = ()
    # Text of WORKDIR/warm_start.yaml; empty: the file is not written.
    record: str = ""
    # The run must continue from its own checkpoint.
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Inputs of one run."""

    # Folder (or URL) of the run.
    workdir: Location
    # Checked between steps and between batches of an evaluation.
    stop: StopRequest
    # Workdir of an earlier phase, whose last state is the first one of this phase.
    continue_from: Location | None = None
    # Parameters of step 0; a run with a checkpoint only logs the messages.
    initial_model: InitialModel = field(default_factory=InitialModel)
    # Let a resumed run change execution.prng.
    allow_numeric_change: bool = False
    # Seconds that the processes of the run wait for each other.
    host_timeout: float = 300.0
    # Start of the process by ``time.perf_counter``; None: now.
    started: float | None = None
    # Devices of the mesh; None: all.
    devices: "list[jax.Device] | None" = None

    def resumed(self) -> "Launch":
        """Return the launch of the same run from its own checkpoint."""
        return dataclasses.replace(self, initial_model=InitialModel(), started=None)
