"""Inputs of a run that are not part of its config. This module does not import jax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert_jax.io.storage import Location
from bert_jax.process.signals import StopRequest
from bert_jax.training.logging.logger import Callback, Logger

if TYPE_CHECKING:
    import jax

    from bert_jax.training.start import RunStart

# Workdir file with the options that the initial model determines, so that a resumed run needs no flags for them.
RECORD = "warm_start.yaml"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Inputs of one run that are not part of its config."""

    # Folder (or URL) of the run.
    workdir: Location
    # Request to stop, checked between steps and between evaluation batches.
    stop: StopRequest
    # Where the run starts.
    start: "RunStart"
    # Maximum seconds that the processes of the run wait for each other.
    host_timeout: float = 300.0
    # Start of the process, as a value of ``time.perf_counter()``; None: the current time.
    started: float | None = None
    # Devices of the mesh; None: all devices.
    devices: "list[jax.Device] | None" = None
    # Called with each line of the log; None: the lines, and a progress bar on a terminal, go to standard output.
    report: Callable[[str], None] | None = None
    # Loggers of the metrics, in addition to metrics.jsonl.
    loggers: tuple[Logger, ...] = ()
    # Functions that the lead process calls with each line of metrics.jsonl, as a dict: ``step``, ``split`` of an
    # evaluation, and the metrics by name. After one returns True, the run is evaluated, saved and reported as at
    # its last step; a later start of the same run continues it. Their exceptions end the run. Must have the same
    # length on every process.
    callbacks: tuple[Callback, ...] = ()
