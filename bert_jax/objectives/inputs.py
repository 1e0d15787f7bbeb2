"""Inputs of an objective other than the training records. This module does not import JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.batch import PretrainSource, RecordFeatures
from bert_jax.config import PretrainConfig, RunOptions
from bert_jax.config.options import Setting
from bert_jax.io.storage import Location
from bert_jax.process.signals import StopRequest
from bert_jax.tokenization import Tokenizer

if TYPE_CHECKING:
    from bert_jax.objectives.objective import PretrainObjective


class Inputs:
    """No inputs, which is the default. An objective with inputs names a subclass in ``PretrainObjective.inputs``.

    A run calls :meth:`find`, :meth:`give` with an objective without a mesh, :meth:`check_vocabulary` before and
    after a vocabulary is trained, :meth:`features`, and at each attempt :meth:`give` and :meth:`write_record`.
    """

    # Options of the config that the inputs determine.
    settings: tuple[Setting, ...] = ()
    # Lines about how the inputs were read.
    notes: tuple[str, ...] = ()

    @classmethod
    def find(cls, config: PretrainConfig, options: RunOptions, workdir: Location) -> "Inputs":
        """Return the inputs that ``options`` name, or with which the run in ``workdir`` began. ``config`` has all
        options except for :attr:`settings`.

        Raises ``ValueError`` for inputs that are missing or that the objective does not read.
        """
        options.require_no_inputs(config.objective.module or f"objective.name {config.objective.name}")
        return cls()

    def check_vocabulary(self, tokenizer: Tokenizer | None, vocabulary: Location) -> None:
        """Raise ``ValueError`` if the inputs require another vocabulary. ``tokenizer``: of the file ``vocabulary``;
        None if this file does not exist yet, so that it would be trained."""

    def features(
        self,
        config: PretrainConfig,
        objective: "type[PretrainObjective]",
        source: PretrainSource,
        stop: StopRequest,
        report: Callable[[str], None],
    ) -> RecordFeatures | None:
        """Return features that the batches of ``source`` shall contain; None: none. ``report`` gets lines about
        their computation, which ``stop`` ends."""
        return None

    def give(self, objective: "PretrainObjective") -> None:
        """Set what ``objective`` reads; on a mesh, copy its arrays to the devices. Raises ``ValueError`` if the
        inputs do not fit the objective."""

    def write_record(self, folder: Path) -> None:
        """Write a file to the workdir ``folder`` from which :meth:`find` finds the inputs again."""
