"""Parameters that a run starts from instead of drawn ones; ``bert_jax.interop.initialization`` plans them."""

from dataclasses import dataclass, field

import numpy as np

# Beside the checkpoints: the options that the start fixed, so that a resumed run needs no flags for them.
RECORD = "warm_start.yaml"


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """Parameters of step 0, with lines for the log and the record of them."""

    # Canonical name -> float32 array; the other parameters are drawn. Emptied once the devices hold them.
    params: dict[str, np.ndarray] = field(default_factory=dict)
    # Lines for the log.
    messages: tuple[str, ...] = ()
    # Text of WORKDIR/warm_start.yaml; empty: the file stays as it is.
    record: str = ""
    # The run has a checkpoint of its own, and nothing to start from without it.
    resumes: bool = False
