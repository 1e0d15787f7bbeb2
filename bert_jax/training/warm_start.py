"""What a run that does not start from drawn parameters is given; ``bert_jax.interop.warm_start`` makes it."""

from dataclasses import dataclass, field

import numpy as np

# Beside the checkpoints: what the start fixed of the config, so that a resumed run needs no flags for it.
RECORD = "warm_start.json"


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Parameters to start from, and what is said and written down about them."""

    # Canonical name -> float32 array; what is missing is drawn. Emptied once the devices have them.
    params: dict[str, np.ndarray] = field(default_factory=dict)
    # A line each, for the log.
    messages: tuple[str, ...] = ()
    # Text of WORKDIR/warm_start.json; empty: left as it is.
    record: str = ""
