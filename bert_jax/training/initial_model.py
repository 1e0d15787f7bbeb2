"""What a run that does not start from drawn parameters is given; ``bert_jax.interop.initialization`` makes it."""

from dataclasses import dataclass, field

import numpy as np

from bert_jax.config.loader import RunOptions
from bert_jax.io.storage import Location, location

# Beside the checkpoints: what the start fixed of the config, so that a resumed run needs no flags for it.
RECORD = "warm_start.yaml"


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Parameters to start from, and what is said and written down about them."""

    # Canonical name -> float32 array; what is missing is drawn. Emptied once the devices have them.
    params: dict[str, np.ndarray] = field(default_factory=dict)
    # A line each, for the log.
    messages: tuple[str, ...] = ()
    # Text of WORKDIR/warm_start.yaml; empty: left as it is.
    record: str = ""
    # There was a checkpoint of the run itself, and nothing to start from without it.
    resumes: bool = False


def asks_for_warm_start(options: RunOptions, workdir: Location) -> bool:
    """Whether the options or the run in ``workdir`` (or in the phase before) are about a model to start from."""
    folders = [workdir, *([location(options.continue_from)] if options.continue_from else [])]
    flags = (options.init_from, options.add_words, options.vocab_slots, options.extend_positions)
    return any(flags) or any((folder / RECORD).is_file() for folder in folders)
